// The conversations, and their pictures, as this page has them and as the browser keeps them.

import { announce } from "../dom.js";
import { shownPath, asTree, newConversation, randomId } from "./tree.js";
import * as store from "./store.js";

const pictures = new Map(); // id -> {id, blob, address}
const written = new Set(); // ids of the pictures that the browser keeps
const opened = new Set(); // ids of the conversations whose pictures are in it
let list = [];
let isKept = true;

/** Return all conversations, the latest first. */
export const conversations = () => list;

/** Return a picture's `{id, blob, address}`. */
export const pictureOf = (id) => pictures.get(id);

/** Hold a picture. */
export function remember({ id, blob }) {
  if (!pictures.has(id)) pictures.set(id, { id, blob, address: URL.createObjectURL(blob) });
}

/** Return the same picture for another conversation: each is kept with one. */
export function copyOfPicture(picture) {
  const copy = { ...picture, id: randomId() };
  remember({ id: copy.id, blob: pictures.get(picture.id).blob });
  return copy;
}

async function keep(change) {
  try {
    await change();
  } catch {
    if (isKept) announce("This browser does not keep conversations here; they end with the page.");
    isKept = false;
  }
}

/** Read what the browser keeps. */
export async function readAll() {
  await keep(async () => {
    list = (await store.listConversations()).map(asTree);
  });
}

/** Read a conversation's pictures. */
export async function readPicturesOf(conversation) {
  if (opened.has(conversation.id)) return;
  opened.add(conversation.id);
  await keep(async () => {
    for (const picture of await store.readPictures(conversation.id)) {
      remember(picture);
      written.add(picture.id);
    }
  });
}

/** Keep a conversation, the latest from now on. */
export async function save(conversation) {
  conversation.updated = Date.now();
  opened.add(conversation.id);
  list = [conversation, ...list.filter((one) => one !== conversation)];
  await writeDown(conversation);
}

/** Keep a conversation where it is. */
export async function writeDown(conversation) {
  if (!list.includes(conversation)) return; // deleted, while it was answered
  const ids = conversation.messages.flatMap((message) => message.pictures ?? []).map(({ id }) => id);
  const unwritten = ids.filter((id) => pictures.has(id) && !written.has(id));
  await keep(async () => {
    await store.writeConversation(conversation, unwritten.map((id) => pictures.get(id)));
    for (const id of unwritten) written.add(id);
  });
}

/** Delete a conversation with its pictures. */
export async function remove(conversation) {
  list = list.filter((one) => one !== conversation);
  await keep(() => store.deleteConversation(conversation.id));
}

/** Return the conversations that hold a text, in their title or in a message. */
export function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return list.filter(({ title, messages }) => {
    const all = [title, ...messages.map((message) => message.text)].join("\n").toLowerCase();
    return words.every((word) => all.includes(word));
  });
}

/** Return the conversation that was open when the page was left. */
export function lastOpened() {
  const id = localStorage.getItem("mmjax.conversation");
  return list.find((one) => one.id === id) ?? newConversation();
}

/** Note which conversation is open. */
export function noteOpened(conversation) {
  if (shownPath(conversation).length) localStorage.setItem("mmjax.conversation", conversation.id);
  else localStorage.removeItem("mmjax.conversation");
}
