// The server's routes; addresses are relative, so that the page works behind a prefix.

/** An answer that is an error, in the server's own words. */
export class ServerError extends Error {
  constructor(status, error, requestId = "") {
    super(error.message || `The server answered ${status || "with an error"}.`);
    this.status = status;
    this.param = error.param ?? "";
    this.code = error.code ?? "";
    this.requestId = requestId;
  }
}

function headers() {
  const key = localStorage.getItem("mmjax.key");
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function send(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers() });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, { message: "The server cannot be reached.", code: "unreachable" });
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const requestId = response.headers.get("x-request-id") ?? "";
  throw new ServerError(response.status, body.error ?? {}, requestId);
}

/** Return the model's card. */
export async function getModel() {
  const list = await (await send("v1/models")).json();
  return list.data[0];
}

/** Return the server's state: `{status, num_programs_left}`. */
export async function getReady() {
  const response = await fetch("ready");
  return { isReady: response.ok, ...(await response.json()) };
}

/** Return the processed prompt of a conversation. */
export async function renderPrompt(messages) {
  const body = JSON.stringify({ messages });
  return (await send("v1/chat/completions/render", { method: "POST", body })).json();
}

/** Yield the chunks of a streamed answer. */
export async function* streamChat(body, signal) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const requestId = response.headers.get("x-request-id") ?? "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ServerError(0, { message: "The connection broke off.", code: "broken" });
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new ServerError(0, chunk.error, requestId);
      yield chunk;
    }
  }
}
