// Sampling, system prompt, API key and theme, in localStorage.

import { byId } from "./dom.js";
import { apiKey, setKey } from "./server/key.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

/** Return the sampling fields that are set. */
export function sampling() {
  const fields = {};
  for (const name of NUMBERS) {
    const text = byId(name).value.trim();
    if (text) fields[name] = Number(text);
  }
  return fields;
}

/** Return the system prompt. */
export function systemPrompt() {
  return byId("system").value.trim();
}

/** Read what was kept. */
export function startSettings() {
  const kept = JSON.parse(localStorage.getItem("mmjax.config.settings") ?? "{}");
  for (const name of [...NUMBERS, "system"]) {
    byId(name).value = kept[name] ?? "";
    byId(name).addEventListener("input", keep);
  }
  byId("api-key").addEventListener("change", () => setKey(byId("api-key").value));
  byId("settings-open").addEventListener("click", () => {
    byId("api-key").value = apiKey();
    byId("settings").showModal();
  });
  byId("reset").addEventListener("click", () => {
    for (const name of NUMBERS) byId(name).value = "";
    keep();
  });
  startTheme();
}

function keep() {
  const values = [...NUMBERS, "system"].map((name) => [name, byId(name).value]);
  localStorage.setItem("mmjax.config.settings", JSON.stringify(Object.fromEntries(values)));
}

function startTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => byId("theme").setAttribute("aria-pressed", String(isDark()));
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("mmjax.theme", root.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  show();
}
