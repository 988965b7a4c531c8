// An answer with what it cost, and with the ways on where it was broken off.

import { isRunning } from "../answers.js";
import { renderPrompt } from "../server/api.js";
import { el, iconButton } from "../dom.js";
import { drawBoxes, findBoxes } from "./boxes.js";
import { showCompareForm } from "./compare.js";
import { markdown } from "./markdown.js";
import { drawStages, drawTokens, summary } from "./strip.js";
import { copy, drawVersions } from "./versions.js";

/** Draw an answer; `thread` has what it needs of the conversation. */
export function drawAnswer(message, thread) {
  const row = el("li", { class: "assistant", "data-id": message.id, "data-state": message.state });
  row.append(el("h2", { class: "hidden" }, "Answer"), drawReasoning(), el("div", { class: "text" }));
  fillAnswer(row, message);
  if (isRunning(message)) return row;
  const boxes = boxesOf(message, thread);
  if (boxes) row.append(boxes);
  const note = noteOf(message);
  if (note) row.append(el("p", { class: "note" }, note));
  if (message.error) row.append(drawError(message.error));
  const ways = waysOn(message, thread);
  if (ways.length) row.append(el("div", { class: "ways" }, ways));
  row.append(
    el(
      "div",
      { class: "actions" },
      drawVersions(message, thread),
      message.text ? iconButton("copy", "Copy the answer", () => copy(message.text)) : null,
      iconButton("again", "Answer again", thread.again),
      message.text ? iconButton("compare", "Compare", () => showCompareForm(row, message, thread)) : null,
      el("span", { class: "summary" }, summary(message)),
    ),
  );
  if (message.metrics) row.append(drawCost(message, thread));
  return row;
}

/** Draw where a model's reasoning goes: folded, and hidden as long as there is none. */
function drawReasoning() {
  const details = el("details", { class: "reasoning", hidden: true }, el("summary", {}), el("div", { class: "thought" }));
  details.addEventListener("toggle", () => showOpened(details));
  return details;
}

/** Draw the text of an answer, also while it grows. */
export function fillAnswer(row, message) {
  const reasoning = row.querySelector(".reasoning");
  reasoning.hidden = !message.reasoning;
  if (message.reasoning) {
    const isThinking = isRunning(message) && !message.text;
    reasoning.querySelector("summary").textContent = isThinking ? "Reasoning \u2026" : "Reasoning";
    reasoning.querySelector(".thought").replaceChildren(...markdown(message.reasoning));
  }
  const nodes = markdown(message.text);
  if (isRunning(message) && !message.text && !message.reasoning) {
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

/** Return a button for each way on from an answer that is not whole. */
function waysOn(message, thread) {
  const button = ([label, click]) => el("button", { type: "button", click }, label);
  if (message.error && thread.isLimit()) return thread.waysPastLimit().map(button);
  const isWhole = message.state === "done" && message.finish !== "length";
  // A structure, and what a model thinks before it answers, begin with the answer's first token.
  const canGoOn = message.text && !message.reasoning && !message.sampling?.response_format;
  return !isWhole && canGoOn ? [button(["Go on with this answer", thread.goOn])] : [];
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
  const pictures = thread.pictures();
  const picture = pictures.at(-1);
  if (!picture) return null;
  const boxes = findBoxes({ parsed: message.parsed, picture, number: pictures.length });
  return boxes.length ? drawBoxes(thread.addressOf(picture.id), picture, boxes) : null;
}

/** Scroll what was opened into view; its beginning, if it is larger than that. */
function showOpened(details) {
  if (details.open) details.scrollIntoView({ block: "nearest" });
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
    showOpened(details);
    if (!details.open || tokens.hasChildNodes()) return;
    tokens.replaceChildren(el("p", { class: "note" }, "Reading the prompt."));
    try {
      const { model } = message;
      const explanation = await renderPrompt({ model, messages: await thread.prompt() });
      const thumbnails = thread.pictures().map(({ id }) => thread.addressOf(id));
      tokens.replaceChildren(...drawTokens(explanation, message.metrics, thumbnails));
    } catch (error) {
      tokens.replaceChildren(drawError(error));
    }
    showOpened(details);
  });
  return details;
}
