// Answers while they are streamed: each to its end, whatever the page shows meanwhile.

import { addMessage, askedWith, leaveOutOldest, pathTo } from "./conversation/tree.js";
import { requestMessages } from "./conversation/request.js";
import { ServerError, streamChat } from "./server/api.js";

const SAVE_MS = 1000;
const GOING_ON = { add_generation_prompt: false, continue_final_message: true };

/** Codes of the errors that fewer messages mend. */
export const LIMITS = new Set(["context_length_exceeded", "too_many_pictures"]);

const running = new Map(); // id of an answer -> what aborts it
let page = null;

/**
 * `own`: what is called when an answer `began`, `grew`, is to be `saved`, and `ended`; `check`
 * throws where the messages are beyond what the model takes.
 */
export function startAnswers(own) {
  page = own;
}

/** Whether an answer is streamed. */
export const isRunning = (message) => running.has(message?.id);

/** End an answer; what there is of it stays. */
export function stopAnswer(message) {
  running.get(message?.id)?.abort();
}

/** Add an answer to the message of the id `parent`, and stream it; `fields`: what it is asked with. */
export function answer(conversation, parent, fields) {
  const message = addMessage(conversation, parent, { role: "assistant", text: "", ...fields });
  stream(conversation, message);
  return message;
}

/** Go on with an answer that was broken off, from its last token. */
export function goOn(conversation, message) {
  stream(conversation, message, message.text);
}

async function stream(conversation, message, begun = "") {
  const abort = new AbortController();
  running.set(message.id, abort);
  message.state = "running";
  for (const name of ["error", "finish", "stop"]) delete message[name];
  page.began(conversation, message);
  try {
    await readAnswer(conversation, message, begun, abort.signal);
    message.state = "done";
  } catch (error) {
    fail(message, error);
  }
  running.delete(message.id);
  page.ended(conversation, message);
}

async function readAnswer(conversation, message, begun, signal) {
  for (;;) {
    try {
      page.check(askedWith(pathTo(conversation, message)));
      return await readOnce(conversation, message, begun, signal);
    } catch (error) {
      const mayDrop = message.dropsOldest && LIMITS.has(error.code);
      if (!mayDrop || !leaveOutOldest(conversation, message)) throw error;
    }
  }
}

async function readOnce(conversation, message, begun, signal) {
  let savedAt = Date.now();
  for await (const chunk of streamChat(await bodyOf(conversation, message, begun), signal)) {
    take(message, chunk);
    page.grew(conversation, message);
    if (Date.now() - savedAt < SAVE_MS) continue;
    savedAt = Date.now();
    page.saved(conversation);
  }
}

async function bodyOf(conversation, message, begun) {
  const messages = await promptOf(conversation, message);
  if (begun) messages.push({ role: "assistant", content: begun });
  const { model, sampling } = message;
  return { model, ...sampling, messages, return_metrics: true, ...(begun ? GOING_ON : {}) };
}

/** Return the messages that an answer is asked with. */
export function promptOf(conversation, message) {
  return requestMessages(askedWith(pathTo(conversation, message)), message.system ?? "", page.dataUrlOf);
}

function take(message, chunk) {
  for (const { delta, finish_reason: reason, stop_reason: stop } of chunk.choices) {
    message.text += delta.content ?? "";
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (thought) message.reasoning = (message.reasoning ?? "") + thought;
    message.parsed = delta.parsed ?? message.parsed;
    message.finish = reason ?? message.finish;
    message.stop = stop ?? message.stop;
  }
  message.model ??= chunk.model; // asked before the page knew which models there are
  message.usage = chunk.usage ?? message.usage;
  message.metrics = chunk.metrics ?? message.metrics;
}

function fail(message, error) {
  if (error.name === "AbortError") {
    message.state = "stopped";
    return;
  }
  message.state = "failed";
  const known = error instanceof ServerError ? error : { message: "The page failed on this answer." };
  const { status, param, code, requestId } = known;
  message.error = { message: known.message, status, param, code, requestId };
}
