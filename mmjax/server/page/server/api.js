// The server's routes; addresses are relative, so that the page works behind a prefix.

import { apiKey, askForKey } from "./key.js";

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
  const key = apiKey();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function get(path, options) {
  try {
    return await fetch(path, { ...options, headers: headers() });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, { message: "The server cannot be reached.", code: "unreachable" });
  }
}

/** Send a request; where a key is needed, ask for it and send it again, if a person waits for it. */
async function send(path, { isAsked = false, ...options } = {}) {
  let response = await get(path, options);
  while (response.status === 401 && isAsked && (await askForKey())) response = await get(path, options);
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const requestId = response.headers.get("x-request-id") ?? "";
  throw new ServerError(response.status, body.error ?? {}, requestId);
}

/** Return the cards of the model, of its other names and of its adapters. */
export async function getModels({ isAsked = false } = {}) {
  return (await (await send("v1/models", { isAsked })).json()).data;
}

/** Return the figures of `/metrics`, as text. */
export async function getMetrics() {
  return (await send("metrics", { isAsked: true })).text();
}

/** Return the server's state: `{status, num_programs_left}`. */
export async function getReady() {
  const response = await fetch("ready");
  return { isReady: response.ok, ...(await response.json()) };
}

/** Return the processed prompt of a conversation: `{messages, ...}`. */
export async function renderPrompt(fields) {
  const body = JSON.stringify(fields);
  return (await send("v1/chat/completions/render", { method: "POST", body, isAsked: true })).json();
}

function brokenOff(requestId) {
  const message = "The connection broke off in the middle of this answer.";
  return new ServerError(0, { message, code: "broken" }, requestId);
}

/** Yield the chunks of a streamed answer. */
export async function* streamChat(body, signal) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
    isAsked: true,
  });
  const requestId = response.headers.get("x-request-id") ?? "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true }; // the server is gone, or what is between
    });
    if (done) throw brokenOff(requestId);
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
