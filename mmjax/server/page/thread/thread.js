// The messages of the open conversation.

import { isRunning, LIMITS, promptOf } from "../answers.js";
import { pictureOf } from "../conversation/kept.js";
import { askedWith, pathTo, shownPath, versionsOf } from "../conversation/tree.js";
import { byId, el } from "../dom.js";
import { modelIds } from "../server/models.js";
import { drawAnswer, fillAnswer } from "./answer.js";
import { drawPair } from "./compare.js";
import { drawQuestion } from "./question.js";

const NEAR_PIXELS = 80;
const compared = new Map(); // id of a question -> that of the answer which the shown one stands beside
const frames = new Map(); // id of an answer that has grown -> its animation frame
let page = null;

/** `own`: `current()`, and what a press on a button does to a message. */
export function startThread(own) {
  page = own;
  byId("viewer").addEventListener("click", ({ target }) => target === byId("viewer") && target.close());
  byId("viewer").addEventListener("close", () => byId("viewer-medium").replaceChildren());
}

/** Draw the whole thread; what had the focus has it afterwards, if it is still there. */
export function drawThread() {
  const restore = noteFocus();
  const conversation = page.current();
  const path = shownPath(conversation);
  byId("title").textContent = conversation.title;
  byId("empty").hidden = path.length > 0;
  byId("messages").replaceChildren(...path.flatMap((message) => [...divider(message, path), drawRow(message)]));
  restore();
}

/** Say where the messages begin that the next answer is asked with. */
function divider(message, path) {
  const isFirst = message.id === path.at(-1).from && message !== path[0];
  return isFirst ? [el("li", { class: "divider" }, "What stands above is no longer sent")] : [];
}

function noteFocus() {
  const node = document.activeElement;
  const id = node.closest?.("[data-id]")?.dataset.id;
  const place = id ? [...byId("messages").children].findIndex((row) => row.dataset.id === id) : -1;
  return () => {
    if (place < 0 || node.isConnected) return;
    const row = rowOf(id) ?? byId("messages").children[place];
    const same = [...(row?.querySelectorAll("button") ?? [])].filter((one) => !one.disabled);
    const found = same.find((one) => one.ariaLabel === node.ariaLabel && one.textContent === node.textContent);
    const near = found ?? same.find((one) => one.closest(".versions") && node.closest(".versions"));
    (near ?? byId("thread")).focus({ preventScroll: true });
  };
}

const rowOf = (id) => byId("messages").querySelector(`[data-id="${id}"]`);

/** Draw a message; an answer that is compared, with the other one beside it. */
function drawRow(message) {
  const other = page.current().messages.find(({ id }) => id === compared.get(message.parent));
  if (!other || other === message) return drawOne(message);
  const keep = (one) => {
    compared.delete(message.parent);
    page.show(one);
  };
  return drawPair([other, message].map((one) => [one, drawOne(one, true), () => keep(one)]));
}

/** Show an answer beside `other`, or beside a new one, asked with `fields`. */
function compare(message, other, fields) {
  compared.set(message.parent, message.id);
  if (other) page.show(other);
  else page.again(message, fields);
}

function drawOne(message, isCompared = false) {
  const conversation = page.current();
  const asked = () => askedWith(pathTo(conversation, message));
  const thread = {
    addressOf: (id) => pictureOf(id)?.address,
    view,
    isCompared,
    versions: () => versionsOf(conversation, message),
    models: modelIds,
    compare: (other, fields) => compare(message, other, fields),
    show: page.show,
    pictures: () => asked().flatMap((one) => one.pictures ?? []).filter(({ kind }) => !kind),
    prompt: () => promptOf(conversation, message),
    edit: (text, kept) => page.edit(message, text, kept),
    again: () => page.again(message),
    goOn: () => page.goOn(message),
    isLimit: () => LIMITS.has(message.error.code),
    waysPastLimit: () => page.waysPastLimit(message),
  };
  return message.role === "user" ? drawQuestion(message, thread) : drawAnswer(message, thread);
}

/** Show a picture or a video large. */
function view({ id, name, kind }) {
  const src = pictureOf(id).address;
  const medium = kind === "video" ? el("video", { src, controls: true, "aria-label": name }) : el("img", { src, alt: name });
  byId("viewer-medium").replaceChildren(medium);
  byId("viewer").showModal();
}

/** Draw one message anew. */
export function redraw(message) {
  cancelAnimationFrame(frames.get(message.id));
  frames.delete(message.id);
  const row = rowOf(message.id);
  if (!row) return;
  if (row.closest(".pair")) {
    following(drawThread);
    return;
  }
  const restore = noteFocus();
  const isOpen = Boolean(row.querySelector(".reasoning[open]"));
  const drawn = drawOne(message);
  if (isOpen) drawn.querySelector(".reasoning").open = true;
  following(() => row.replaceWith(drawn));
  restore();
}

/** Draw the text of an answer that has grown, in the next frame. */
export function drawGrown(message) {
  if (frames.has(message.id)) return;
  const frame = requestAnimationFrame(() => {
    frames.delete(message.id);
    const row = rowOf(message.id);
    if (row && isRunning(message)) following(() => fillAnswer(row, message));
  });
  frames.set(message.id, frame);
}

/** Change the thread; who is at its end stays there. */
function following(change) {
  const thread = byId("thread");
  const isAtEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < NEAR_PIXELS;
  change();
  if (isAtEnd) scrollToEnd();
}

/** Show the end of the thread. */
export function scrollToEnd() {
  byId("thread").scrollTop = byId("thread").scrollHeight;
}
