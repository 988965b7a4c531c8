// One message: a question with its pictures, or an answer with what it cost.

import { renderPrompt } from "./api.js";
import { drawBoxes, findBoxes } from "./boxes.js";
import { el, iconButton } from "./dom.js";
import { markdown } from "./markdown.js";
import { drawStages, drawTokens, summary } from "./strip.js";

/** Return a message as an element; `thread` has what it needs of the conversation. */
export function drawMessage(message, thread) {
  return message.role === "user" ? drawQuestion(message, thread) : drawAnswer(message, thread);
}

function drawQuestion(message, thread) {
  const row = el("li", { class: "user" }, el("h2", { class: "hidden" }, "You"));
  const thumbnails = message.pictures.map(({ id, name }) =>
    el("button", { type: "button", class: "thumbnail", "aria-label": `Show ${name}` }, el("img", { src: thread.addressOf(id), alt: name })),
  );
  if (thumbnails.length) row.append(el("div", { class: "thumbnails" }, thumbnails));
  if (message.text) row.append(el("p", { class: "bubble" }, message.text));
  row.append(
    el(
      "div",
      { class: "actions" },
      iconButton("copy", "Copy the question", () => copy(message.text, thread)),
      iconButton("edit", "Edit the question", () => row.replaceChildren(drawEditor(message, thread, row))),
    ),
  );
  return row;
}

function drawEditor(message, thread, row) {
  let kept = message.pictures;
  const box = el("textarea", { "aria-label": "Edit the question", rows: Math.min(8, message.text.split("\n").length + 1) });
  box.value = message.text;
  const list = el("ul", { class: "drafts", "aria-label": "Pictures of the question" });
  const draw = () =>
    list.replaceChildren(
      ...kept.map((picture) =>
        el(
          "li",
          {},
          el("img", { src: thread.addressOf(picture.id), alt: picture.name, width: 64, height: 64 }),
          iconButton("close", `Remove ${picture.name}`, () => {
            kept = kept.filter((one) => one !== picture);
            draw();
            box.focus();
          }),
        ),
      ),
    );
  draw();
  const cancel = () => {
    const drawn = drawQuestion(message, thread);
    row.replaceWith(drawn);
    drawn.querySelector("[aria-label='Edit the question']").focus();
  };
  const send = () => {
    const text = box.value.trim();
    if (text || kept.length) thread.edit(text, kept);
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  queueMicrotask(() => box.focus());
  return el(
    "div",
    { class: "editor" },
    list,
    box,
    el(
      "div",
      { class: "buttons" },
      el("button", { type: "button", click: cancel }, "Cancel"),
      el("button", { type: "button", class: "primary", click: send }, "Send again"),
    ),
  );
}

function drawAnswer(message, thread) {
  const row = el("li", { class: "assistant", "data-state": message.state });
  row.append(el("h2", { class: "hidden" }, "Answer"), el("div", { class: "text" }));
  fillAnswer(row, message);
  if (thread.isRunning) return row;
  const boxes = boxesOf(message, thread);
  if (boxes) row.append(boxes);
  const note = noteOf(message);
  if (note) row.append(el("p", { class: "note" }, note));
  if (message.error) row.append(drawError(message.error));
  row.append(
    el(
      "div",
      { class: "actions" },
      message.text ? iconButton("copy", "Copy the answer", () => copy(message.text, thread)) : null,
      iconButton("again", "Answer again", thread.again),
      el("span", { class: "summary" }, summary(message)),
    ),
  );
  if (message.metrics) row.append(drawCost(message, thread));
  return row;
}

/** Draw the text of an answer, also while it grows. */
export function fillAnswer(row, message) {
  const nodes = markdown(message.text);
  if (message.state === "running" && !message.text) {
    nodes.push(el("p", { class: "waiting" }, el("span", { class: "hidden" }, "Waiting for the first token")));
  }
  row.querySelector(".text").replaceChildren(...nodes);
}

function noteOf({ state, finish, text }) {
  if (state === "stopped") return "Stopped.";
  if (state === "running") return "The page was closed during this answer.";
  if (finish === "length") return "The answer reached its limit of tokens.";
  return state === "done" && !text ? "The answer is empty." : "";
}

function drawError({ message, status, param, code, requestId }) {
  const facts = [status, code, param && `field ${param}`, requestId && `request ${requestId}`];
  return el(
    "div",
    { class: "error", role: "alert" },
    el("p", {}, message),
    el("p", { class: "facts" }, facts.filter(Boolean).join(" \u00b7 ")),
  );
}

function boxesOf(message, thread) {
  const list = thread.lastPictures();
  const picture = list.at(-1);
  if (!picture || !message.text) return null;
  const items = message.metrics?.items ?? [];
  const boxes = findBoxes({ ...message, picture, item: items.at(-1), unit: thread.boxUnit() });
  return boxes.length ? drawBoxes(thread.addressOf(picture.id), picture, boxes) : null;
}

function drawCost(message, thread) {
  const tokens = el("div", { class: "tokens" });
  const details = el(
    "details",
    { class: "cost" },
    el("summary", {}, "Tokens, caches and times"),
    drawStages(message.metrics),
    tokens,
  );
  details.addEventListener("toggle", async () => {
    if (!details.open || tokens.hasChildNodes()) return;
    tokens.replaceChildren(el("p", { class: "note" }, "Reading the prompt."));
    try {
      const explanation = await renderPrompt(await thread.requestMessages());
      const thumbnails = thread.allPictures().map(({ id }) => thread.addressOf(id));
      tokens.replaceChildren(...drawTokens(explanation, message.metrics, thumbnails));
    } catch (error) {
      tokens.replaceChildren(drawError(error));
    }
  });
  return details;
}

async function copy(text, thread) {
  try {
    await navigator.clipboard.writeText(text);
    thread.announce("Copied.");
  } catch {
    thread.announce("The browser does not allow copying here.");
  }
}
