// Two answers to one question beside each other: other seeds, another adapter.

import { el } from "../dom.js";

/** Return what an answer was asked with, where that may differ. */
function askedWith({ model, sampling }) {
  const seed = sampling?.seed;
  return [model, seed === undefined ? "any seed" : `seed ${seed}`].filter(Boolean).join(", ");
}

/** Show, below an answer, what it may be compared with. */
export function showCompareForm(row, message, thread) {
  const shown = row.querySelector(".compare");
  if (shown) {
    shown.remove();
    return;
  }
  const versions = thread.versions();
  const others = versions.filter((one) => one !== message && one.text);
  const choice = el(
    "select",
    {},
    thread.models().map((id) => el("option", { value: `model ${id}` }, `A new answer of ${id}`)),
    others.map((one) => el("option", { value: one.id }, `Version ${versions.indexOf(one) + 1}: ${askedWith(one)}`)),
  );
  const seed = el("input", { type: "number", step: 1, min: 0, inputmode: "numeric", placeholder: "any" });
  const seedBox = el("label", {}, "Seed", seed);
  choice.addEventListener("change", () => {
    seedBox.hidden = !choice.value.startsWith("model ");
  });
  const close = () => {
    form.remove();
    row.querySelector("[aria-label='Compare']").focus();
  };
  const form = el(
    "form",
    { class: "compare", submit: (event) => {
      event.preventDefault();
      const other = others.find(({ id }) => id === choice.value);
      const model = choice.value.slice("model ".length);
      thread.compare(other, { model, seed: seed.value ? Number(seed.value) : undefined });
    } },
    el("label", {}, "Compare with", choice),
    seedBox,
    el(
      "div",
      { class: "buttons" },
      el("button", { type: "button", click: close }, "Cancel"),
      el("button", { type: "submit", class: "primary" }, "Show both"),
    ),
  );
  form.addEventListener("keydown", (event) => event.key === "Escape" && close());
  row.append(form);
  form.scrollIntoView({ block: "nearest" });
  choice.focus();
}

/** Draw answers beside each other; of each: the message, its element, and how to keep it alone. */
export function drawPair(answers) {
  const columns = answers.map(([message, row, keep], index) => {
    const name = el("h3", {}, askedWith(message));
    const button = el("button", { type: "button", "aria-label": `Keep the answer on the ${index ? "right" : "left"}`, click: keep }, "Keep this one");
    row.prepend(el("div", { class: "pair-head" }, name, button));
    return row;
  });
  return el("li", { class: "pair" }, el("ol", { "aria-label": "Answers beside each other" }, columns));
}
