// What the server serves: the model and its adapters, what they take, and how much is left of that.

import { byId, el } from "../dom.js";

let cards = [];
let changed = () => {};

/** Call `onChange` when another model is chosen. */
export function startModels(onChange) {
  changed = onChange;
  byId("model").addEventListener("change", () => {
    localStorage.setItem("mmjax.model", byId("model").value);
    changed();
  });
}

/** Show the cards of `/v1/models`. */
export function showModels(list) {
  const isKnown = JSON.stringify(list) === JSON.stringify(cards);
  cards = list;
  if (isKnown) return;
  const kept = localStorage.getItem("mmjax.model");
  const option = ({ id }) => el("option", { value: id }, id);
  const adapters = list.filter(({ parent }) => parent).map(option);
  const own = list.filter(({ parent }) => !parent).map(option);
  const groups = adapters.length ? [["Model", own], ["Adapters", adapters]] : [];
  const nodes = groups.map(([label, options]) => el("optgroup", { label }, options));
  byId("model").replaceChildren(...(nodes.length ? nodes : own));
  byId("model").value = (list.find(({ id }) => id === kept) ?? list[0]).id;
  byId("model").disabled = list.length < 2;
  byId("model-box").hidden = false;
  changed();
}

/** Return the ids that a request may name. */
export const modelIds = () => cards.map(({ id }) => id);

/** Return the chosen model's id; undefined before it is known. */
export const chosenModel = () => card()?.id;

const card = () => cards.find(({ id }) => id === byId("model").value) ?? cards[0];

/** Return what the model can do: `tasks`, `limit_mm_per_prompt`. */
export const capabilities = () => card()?.capabilities ?? {};

/** Return how many items of a kind one prompt may hold; undefined where that is not known. */
export const limitOf = (kind) => capabilities().limit_mm_per_prompt?.[kind];

/** Whether a prompt may hold items of a kind; until the model is known, what it is asked then tells. */
export const takes = (kind) => {
  if (!cards.length) return true;
  const limits = capabilities().limit_mm_per_prompt;
  if (kind === "image") return !limits || "image" in limits;
  return limits?.[kind] > 0;
};

/** Show what of the model's context the last answer fills, and how many pictures may still come. */
export function showLeft(messages, drafts) {
  const usage = messages.findLast((message) => message.usage)?.usage;
  const whole = card()?.max_model_len;
  byId("context").hidden = !usage || !whole;
  if (usage && whole) showContext(usage.prompt_tokens + usage.completion_tokens, whole);
  const pictures = [...messages.flatMap((message) => message.pictures ?? []), ...drafts];
  const limit = limitOf("image");
  const left = limit - pictures.filter(({ kind }) => !kind).length;
  byId("pictures-left").hidden = limit === undefined;
  byId("pictures-left").classList.toggle("problem", left < 0);
  byId("pictures-left").textContent = left < 0 ? `${plural(-left)} too many` : `${plural(left)} left`;
}

const plural = (count) => `${count} ${count === 1 ? "picture" : "pictures"}`;

function showContext(used, whole) {
  const share = Math.min(100, Math.round((100 * used) / whole));
  const meter = byId("context-meter");
  meter.setAttribute("aria-valuenow", share);
  meter.setAttribute("aria-valuetext", `${used} of ${whole} tokens`);
  meter.firstElementChild.style.inlineSize = `${share}%`;
  meter.classList.toggle("full", share >= 90);
  byId("context-text").textContent = `${used.toLocaleString("en")} of ${whole.toLocaleString("en")} tokens`;
}
