// A question with its pictures, and its editor.

import { thumbnail } from "../composer/media.js";
import { el, iconButton } from "../dom.js";
import { copy, drawVersions } from "./versions.js";

/** Draw a question; `thread` has what it needs of the conversation. */
export function drawQuestion(message, thread) {
  const row = el("li", { class: "user", "data-id": message.id }, el("h2", { class: "hidden" }, "You"));
  const shown = message.pictures.map((medium) => {
    const small = thumbnail(medium, thread.addressOf(medium.id));
    if (medium.kind === "audio") return small; // a clip is played where it stands
    const properties = { type: "button", class: "thumbnail", "aria-label": `Show ${medium.name}` };
    return el("button", { ...properties, click: () => thread.view(medium) }, small);
  });
  if (shown.length) row.append(el("div", { class: "thumbnails" }, shown));
  if (message.text) row.append(el("p", { class: "bubble" }, message.text));
  row.append(
    el(
      "div",
      { class: "actions" },
      drawVersions(message, thread),
      iconButton("copy", "Copy the question", () => copy(message.text)),
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
  const draw = () => {
    const remove = (medium) => {
      kept = kept.filter((one) => one !== medium);
      draw();
      box.focus();
    };
    list.replaceChildren(...kept.map((medium) => drawKept(medium, thread, () => remove(medium))));
  };
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

function drawKept(medium, thread, remove) {
  const size = { width: 64, height: 64 };
  return el(
    "li",
    {},
    thumbnail(medium, thread.addressOf(medium.id), size),
    iconButton("close", `Remove ${medium.name}`, remove),
  );
}
