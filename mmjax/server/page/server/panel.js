// The server's figures, from `/metrics`: its load, its caches, its programs.

import { byId, el } from "../dom.js";
import { getMetrics } from "./api.js";

const EVERY_MS = 2000;
const LINE = /^([a-zA-Z_][\w:]*)(?:\{.*\})? ([^ ]+)/;

let timer = 0;
let before = null; // {at, tokens} of the last look

/** Show the panel, and renew it as long as it is open. */
export function openPanel() {
  before = null;
  byId("server").onclose = () => clearTimeout(timer);
  byId("server").showModal();
  look();
}

async function look() {
  clearTimeout(timer);
  try {
    const figures = readMetrics(await getMetrics());
    byId("figures").replaceChildren(...sections(figures).map(drawSection));
    byId("server-problem").textContent = "";
  } catch (error) {
    byId("server-problem").textContent = error.message;
  }
  byId("server-problem").hidden = !byId("server-problem").textContent;
  if (byId("server").open) timer = setTimeout(look, EVERY_MS);
}

/** Return each metric's value, the sum of its series: `{name: number}`. */
export function readMetrics(text) {
  const figures = {};
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (found) figures[found[1]] = (figures[found[1]] ?? 0) + Number(found[2]);
  }
  return figures;
}

function sections(figures) {
  const whole = (name) => count(figures[name]);
  const hits = (name) => share(figures[`${name}_hits_total`], figures[`${name}_queries_total`]);
  const of = (name) => share(figures[name], 1);
  const has = (...names) => names.some((name) => figures[name] > 0);
  const found = (name, read, unit) => ({ text: `${count(figures[name]).text}${unit}, ${bytes(figures[read])}` });
  const [programs, left] = [figures["mmjax:programs"], figures["mmjax:programs_left"]];
  return [
    ["Load", [
      ["Requests that run", whole("vllm:num_requests_running")],
      ["Requests that wait", whole("vllm:num_requests_waiting")],
      ["Requests whose pictures are read", whole("mmjax:num_requests_processing")],
      ["Tokens written per second", tokensPerSecond(figures["vllm:generation_tokens_total"])],
      ["Answers so far", whole("vllm:request_success_total")],
    ]],
    ["Caches", [
      ["KV cache in use", of("vllm:kv_cache_usage_perc")],
      ["Encoder cache in use", of("mmjax:encoder_cache_usage_perc")],
      ["Prompt tokens found in a cache", hits("vllm:prefix_cache")],
      ["Pictures whose embeddings were found", hits("mmjax:encoder_cache")],
      ["Pictures whose pixels were found", hits("vllm:mm_cache")],
    ]],
    ["Pictures' embeddings, by where they were", [
      ["On the device", { text: `${whole("mmjax:encoder_cache_hits_total").text} items` }],
      ...when(has("mmjax:encoder_disk_queries_total"), [
        ["On disk", found("mmjax:encoder_disk_hits_total", "mmjax:encoder_disk_read_bytes_total", " items")],
      ]),
      ...when(has("mmjax:encoder_workers_alive", "mmjax:encoder_workers_items_total", "mmjax:encoder_workers_fallbacks_total"), [
        ["From encode workers", found("mmjax:encoder_workers_items_total", "mmjax:encoder_workers_bytes_total", " items")],
        ["Encode workers", whole("mmjax:encoder_workers_alive")],
        ["Asked of a worker once more", whole("mmjax:encoder_workers_retries_total")],
        ["Encoded here, for want of a worker", whole("mmjax:encoder_workers_fallbacks_total")],
      ]),
    ]],
    ["Pictures' pixels, by where they were", [
      ["In memory", { text: `${whole("vllm:mm_cache_hits_total").text} items` }],
      ...when(figures["mmjax:mm_disk_queries_total"] !== undefined, [
        ["On disk", found("mmjax:mm_disk_hits_total", "mmjax:mm_disk_read_bytes_total", " items")],
      ]),
    ]],
    ["The KV cache, by where it was", [
      ["On the device", { text: `${whole("vllm:prefix_cache_hits_total").text} tokens` }],
      ...when(has("mmjax:kv_offload_queries_total"), [
        ["In host memory", found("mmjax:kv_offload_hits_total", "mmjax:kv_offload_restored_bytes_total", " tokens")],
      ]),
      ...when(has("mmjax:kv_files_hits_total", "mmjax:kv_files_misses_total"), [
        ["On disk", found("mmjax:kv_files_hits_total", "mmjax:kv_files_read_bytes_total", " blocks")],
      ]),
    ]],
    ["Programs", [
      ["Compiled", programs === undefined || left === undefined ? count() : share(programs - left, programs, `${programs - left} of ${programs}`)],
      ["Steps that waited for one", whole("mmjax:compilations_total")],
    ]],
    ["Engine", [
      ["Memory", { text: bytes(figures["mmjax:engine_resident_memory_bytes"]) }],
      ["Restarts", whole("mmjax:engine_restarts_total")],
    ]],
  ];
}

/** Return the rows of what the server was started with; none of what it lacks. */
const when = (is, rows) => (is ? rows : []);

function count(value) {
  return { text: value === undefined ? "not told" : value.toLocaleString("en", { maximumFractionDigits: 1 }) };
}

function share(part, whole, text) {
  if (part === undefined || whole === undefined) return count();
  if (!whole) return { text: "none yet" };
  const percent = (100 * part) / whole;
  return { text: text ?? `${percent.toFixed(percent < 10 && percent > 0 ? 1 : 0)} %`, percent };
}

function bytes(value) {
  if (value === undefined) return "not told";
  const [size, unit] = value < 2 ** 29 ? [2 ** 20, "MiB"] : [2 ** 30, "GiB"];
  return `${(value / size).toFixed(2)} ${unit}`;
}

function tokensPerSecond(tokens) {
  if (tokens === undefined) return count();
  const now = { at: performance.now(), tokens };
  const last = before;
  before = now;
  if (!last) return { text: "\u2026" };
  return count(Math.max(0, (1000 * (now.tokens - last.tokens)) / (now.at - last.at)));
}

function drawSection([name, rows]) {
  const lines = rows.map(([label, { text, percent }]) => el("div", {}, el("dt", {}, label), el("dd", {}, text), bar(percent)));
  return el("section", {}, el("h3", {}, name), el("dl", {}, lines));
}

/** Draw a share; its number stands beside it. */
function bar(percent) {
  if (percent === undefined) return null;
  const filled = el("span", {});
  filled.style.inlineSize = `${Math.min(100, percent)}%`;
  return el("dd", { class: "share", "aria-hidden": "true" }, filled);
}
