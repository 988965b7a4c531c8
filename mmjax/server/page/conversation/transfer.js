// Conversations as a JSON file, and back. A file may come from anywhere: each value of it is checked.

import { toDataUrl } from "../composer/media.js";
import { pictureOf } from "./kept.js";
import { asTree, randomId } from "./tree.js";

const FORMAT = "mmjax conversations";
const VERSION = 1;
const DATA = /^data:((?:image|video|audio)\/[\w.+-]+);base64,([A-Za-z0-9+/]*={0,2})$/;
const STATES = ["done", "stopped", "failed", "running"];

/** Return conversations, with their pictures, as a file. */
export async function toFile(conversations) {
  const list = [];
  for (const { id, ...conversation } of conversations) {
    const pictures = {};
    for (const one of conversation.messages.flatMap((message) => message.pictures ?? [])) {
      const held = pictureOf(one.id);
      if (held) pictures[one.id] = await toDataUrl(held.blob);
    }
    list.push({ ...conversation, files: pictures });
  }
  const text = JSON.stringify({ format: FORMAT, version: VERSION, conversations: list });
  return new Blob([text], { type: "application/json" });
}

/** Return the `{conversation, pictures}` of a file; raise an error that says what is wrong with it. */
export function fromFile(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("it is no JSON.");
  }
  check(data?.format === FORMAT, `it is no file of this page (its \u201cformat\u201d is not \u201c${FORMAT}\u201d).`);
  check(data.version === VERSION, `its \u201cversion\u201d is ${data.version}; this page reads ${VERSION}.`);
  return list(data.conversations).map(readConversation);
}

function check(isRight, problem) {
  if (!isRight) throw new Error(problem);
}

function list(value) {
  check(Array.isArray(value), "a list is missing in it.");
  return value;
}

function string(value, fallback = "") {
  return typeof value === "string" ? value : fallback;
}

const object = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : undefined);

const number = (value) => (Number.isFinite(value) ? value : 0);

/** Return a conversation under new ids: one that is here already stays as it is. */
function readConversation(data) {
  const files = new Map(Object.entries(object(data?.files) ?? {}));
  const ids = new Map([["", ""]]);
  const pictures = [];
  const messages = list(data?.messages).map((message) => {
    check(!ids.has(message?.id) && typeof message.id === "string", "two of its messages have one id, or one has none.");
    ids.set(message.id, randomId());
    return { ...readMessage(message, files, pictures), id: ids.get(message.id), parent: string(message.parent) };
  });
  for (const message of messages) {
    check(ids.has(message.parent), "a message follows one that is not in it.");
    message.parent = ids.get(message.parent);
    if (message.from) message.from = ids.get(message.from);
  }
  const chosen = Object.entries(object(data.chosen) ?? {}).map(([parent, id]) => [ids.get(parent), ids.get(id)]);
  const shown = Object.fromEntries(chosen.filter(([parent, id]) => parent !== undefined && id));
  const title = string(data.title, "Imported").slice(0, 120);
  return { conversation: asTree({ id: randomId(), title, updated: 0, messages, chosen: shown }), pictures };
}

function readMessage(data, files, pictures) {
  if (data.role === "user") {
    return { role: "user", text: string(data.text), pictures: (data.pictures ?? []).map((one) => readPicture(one, files, pictures)) };
  }
  check(data.role === "assistant", "a message is neither a question nor an answer.");
  const kept = { role: "assistant", text: string(data.text), state: STATES.includes(data.state) ? data.state : "done" };
  for (const name of ["reasoning", "system", "model", "finish", "from"]) {
    if (typeof data[name] === "string") kept[name] = data[name];
  }
  for (const name of ["sampling", "parsed"]) {
    if (object(data[name])) kept[name] = data[name];
  }
  if (object(data.usage)) kept.usage = readNumbers(data.usage);
  if (object(data.error)) kept.error = { message: string(data.error.message), code: string(data.error.code) };
  if (object(data.metrics)) {
    const items = Array.isArray(data.metrics.items) ? data.metrics.items.filter(object) : [];
    kept.metrics = { total_time_ms: 0, generation_time_ms: 0, ...readNumbers(data.metrics), items };
  }
  return kept;
}

function readNumbers(data) {
  return Object.fromEntries(Object.entries(data).filter(([, value]) => Number.isFinite(value)));
}

function readPicture(data, files, pictures) {
  const found = DATA.exec(files.get(data?.id) ?? "");
  check(found, `the data of the picture \u201c${string(data?.name)}\u201d are missing, or are no picture.`);
  const bytes = Uint8Array.from(atob(found[2]), (character) => character.charCodeAt(0));
  const id = randomId();
  pictures.push({ id, blob: new Blob([bytes], { type: found[1] }) });
  const [type] = found[1].split("/");
  const kind = type === "image" ? {} : { kind: type };
  return { id, name: string(data.name, "picture"), width: number(data.width), height: number(data.height), ...kind };
}
