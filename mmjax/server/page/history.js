// A conversation as the messages of a request.

/** Return OpenAI's messages; `dataUrlOf` returns a picture's data by its id. */
export async function requestMessages(messages, system, dataUrlOf) {
  const list = system ? [{ role: "system", content: system }] : [];
  for (const { role, text, pictures = [] } of messages) {
    if (!pictures.length) {
      list.push({ role, content: text });
      continue;
    }
    const urls = await Promise.all(pictures.map(({ id }) => dataUrlOf(id)));
    const content = urls.map((url) => ({ type: "image_url", image_url: { url } }));
    if (text) content.push({ type: "text", text });
    list.push({ role, content });
  }
  return list;
}
