// What an answer cost: its stages, and its prompt's tokens by the cache that they came from.

import { el } from "../dom.js";

const STAGES = [
  ["fetch", "host", "get the pictures' bytes"],
  ["tokenize", "host", "render the chat template, and tokenize"],
  ["decode", "host", "decode the picture files"],
  ["process", "host", "hash, resize and normalise"],
  ["queue", "wait", "wait for a turn"],
  ["encode", "device", "run the vision encoder"],
  ["prefill", "device", "compute the prompt"],
  ["generation", "device", "write the answer"],
  ["other", "wait", "everything else, such as messages between processes"],
];
const NAMES = { generation: "generate" };
const MAX_CELLS = 1500;
const SOURCES = {
  prefix_cache: "prefix cache",
  encoder_cache: "encoder cache",
  processor_cache: "processor cache",
  disk: "disk",
  worker: "worker",
  computed: "computed",
  hidden: "not told",
};

/** Return milliseconds as a short text. */
export function duration(ms) {
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return ms >= 10 ? `${Math.round(ms)} ms` : `${ms.toFixed(ms >= 1 ? 1 : 2)} ms`;
}

/** Return how many tokens an answer has; the one that ends it is no part of its text. */
export function tokenCount({ usage, finish, stop }) {
  const hasEnd = finish === "stop" && typeof stop !== "string"; // else a text has ended it
  const count = usage.completion_tokens - (hasEnd ? 1 : 0);
  const tokens = `${count} ${count === 1 ? "token" : "tokens"}`;
  return hasEnd ? `${tokens} and ${count === 1 ? "its" : "their"} end` : tokens;
}

/** Return the line under an answer. */
export function summary(message) {
  const { usage, metrics } = message;
  const parts = [];
  if (usage) parts.push(tokenCount(message));
  if (metrics?.tokens_per_second) parts.push(`${metrics.tokens_per_second.toFixed(1)} tokens/s`);
  if (metrics) {
    parts.push(`first token after ${duration(metrics.total_time_ms - metrics.generation_time_ms)}`);
  }
  return parts.join(" \u00b7 ");
}

/** Return the stages as bars, each beginning where the one before it ends. */
export function drawStages(metrics) {
  const times = STAGES.map(([stage]) => metrics[`${stage}_time_ms`] ?? 0);
  const sum = times.reduce((total, time) => total + time, 0);
  times[times.length - 1] = Math.max(0, metrics.total_time_ms - sum);
  const whole = Math.max(metrics.total_time_ms, sum, 0.001);
  let begin = 0;
  const rows = STAGES.map(([stage, kind, meaning], index) => {
    const bar = el("span", { class: `bar ${kind}` });
    bar.style.insetInlineStart = `${(100 * begin) / whole}%`;
    bar.style.inlineSize = `${(100 * times[index]) / whole}%`;
    begin += times[index];
    const name = NAMES[stage] ?? stage;
    const isUnused = times[index] < 0.005;
    return el(
      "tr",
      isUnused ? { class: "unused" } : {},
      el("th", { scope: "row", title: meaning }, name),
      el("td", { class: "track", "aria-hidden": "true" }, el("span", { class: "lane" }, bar)),
      el("td", { class: "number" }, isUnused ? "\u2013" : duration(times[index])),
    );
  });
  return el(
    "table",
    { class: "stages" },
    el("caption", {}, "Time of each stage ", el("b", {}, `${duration(metrics.total_time_ms)} in all`)),
    el("tbody", {}, rows),
  );
}

/** Return the prompt's tokens; a picture's are one cell with its thumbnail. */
export function drawTokens(explanation, metrics, thumbnails) {
  const isEncoder = Boolean(explanation.encoder_tokens);
  const prompts = isEncoder
    ? [["Encoder prompt", explanation.encoder_tokens, explanation.items, 0]]
    : [];
  const items = isEncoder ? [] : explanation.items;
  prompts.push([isEncoder ? "Decoder prompt" : "Prompt", explanation.tokens, items, metrics.num_cached_tokens]);
  return prompts.map(([name, tokens, own, numCached]) =>
    el(
      "section",
      { "aria-label": `${name}'s tokens` },
      el("h3", {}, name, el("small", {}, ` ${tokens.length} tokens`)),
      legend(tokens.length, numCached),
      drawStrip(tokens, own, metrics, numCached, thumbnails),
    ),
  );
}

function legend(count, numCached) {
  return el(
    "ul",
    { class: "legend" },
    el("li", {}, el("span", { class: "token cached", "aria-hidden": "true" }), `prefix cache: ${numCached}`),
    el("li", {}, el("span", { class: "token", "aria-hidden": "true" }), `computed: ${count - numCached}`),
  );
}

function drawStrip(tokens, items, metrics, numCached, thumbnails) {
  const strip = el("div", { class: "strip", tabindex: "0", role: "region", "aria-label": "Tokens" });
  const starts = new Map(items.map((item) => [item.offset, item]));
  let numCells = 0;
  for (let place = 0; place < tokens.length; numCells += 1) {
    if (numCells === MAX_CELLS) {
      strip.append(el("span", { class: "more" }, `and ${tokens.length - place} more tokens`));
      break;
    }
    const item = starts.get(place);
    if (item) {
      strip.append(pictureCell(item, metrics, thumbnails));
      place += item.length;
    } else {
      strip.append(tokenCell(tokens[place], place, place < numCached));
      place += 1;
    }
  }
  return strip;
}

function tokenCell(text, place, isCached) {
  const shown = text.replaceAll("\n", "\u23ce").replace(/^ | $/g, "\u00b7") || "\u2205";
  const source = isCached ? "prefix cache" : "computed";
  return el("span", { class: isCached ? "token cached" : "token", title: `token ${place}: ${source}` }, shown);
}

function pictureCell(item, metrics, thumbnails) {
  const facts = metrics.items.find((one) => one.modality === item.modality && one.index === item.index);
  const encoding = SOURCES[facts?.encoding] ?? "not told";
  const processing = SOURCES[facts?.processing] ?? "not told";
  const address = item.modality === "image" ? thumbnails[item.index] : undefined;
  const name = `${item.modality} ${item.index + 1}`;
  return el(
    "span",
    { class: `picture-cell ${facts?.encoding ?? ""}` },
    address ? el("img", { src: address, alt: "", width: 44, height: 44 }) : null,
    el(
      "span",
      {},
      el("b", {}, `${name}: ${item.length} tokens`),
      el("span", {}, `embeddings: ${encoding}`),
      el("span", {}, `${item.modality === "audio" ? "spectrogram" : "pixels"}: ${processing}`),
    ),
  );
}
