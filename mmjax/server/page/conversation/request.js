// A conversation as the messages of a request.

/** Return OpenAI's messages; `dataUrlOf` returns a picture's data by its id. */
export async function requestMessages(messages, system, dataUrlOf) {
  const list = system ? [{ role: "system", content: system }] : [];
  for (const { role, text, pictures = [] } of messages) {
    if (!pictures.length) {
      list.push({ role, content: text });
      continue;
    }
    const content = await Promise.all(pictures.map((picture) => part(picture, dataUrlOf)));
    if (text) content.push({ type: "text", text });
    list.push({ role, content });
  }
  return list;
}

async function part({ id, kind }, dataUrlOf) {
  const url = await dataUrlOf(id);
  if (kind === "audio") return { type: "audio_url", audio_url: { url } };
  return kind === "video"
    ? { type: "video_url", video_url: { url } }
    : { type: "image_url", image_url: { url } };
}
