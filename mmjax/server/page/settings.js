// Sampling, system prompt, API key and theme, in localStorage.

import { byId } from "./dom.js";
import { apiKey, setKey } from "./server/key.js";

const NUMBERS = [
  ...["temperature", "top_p", "top_k", "max_tokens", "min_p", "seed"],
  ...["frequency_penalty", "presence_penalty", "repetition_penalty"],
];
const TEXTS = ["stop-texts", "schema"];
const FIELDS = [...NUMBERS, ...TEXTS, "system"];

/** Return the fields of a request that are set; throw where one of them is wrong. */
export function sampling() {
  const fields = {};
  for (const name of NUMBERS) {
    const text = byId(name).value.trim();
    if (text) fields[name] = Number(text);
  }
  const stop = byId("stop-texts").value.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop.map((text) => text.replaceAll("\\n", "\n"));
  const schema = readSchema();
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return fields;
}

/** Return the schema; null where there is none. */
function readSchema() {
  const text = byId("schema").value.trim();
  if (!text) return null;
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    throw new Error(`The JSON schema in the settings is no JSON: ${error.message}`);
  }
  if (schema && typeof schema === "object" && !Array.isArray(schema)) return schema;
  throw new Error("The JSON schema in the settings is no object: write one, such as {\"type\": \"object\"}.");
}

/** Say at the field what is wrong with the schema. */
function checkSchema() {
  let problem = "";
  try {
    readSchema();
  } catch (error) {
    problem = error.message;
  }
  byId("schema-error").textContent = problem;
  byId("schema-error").hidden = !problem;
  byId("schema").toggleAttribute("aria-invalid", Boolean(problem));
}

/** Return the system prompt. */
export function systemPrompt() {
  return byId("system").value.trim();
}

/** Read what was kept. */
export function startSettings() {
  const kept = JSON.parse(localStorage.getItem("mmjax.config.settings") ?? "{}");
  for (const name of FIELDS) {
    byId(name).value = kept[name] ?? "";
    byId(name).addEventListener("input", keep);
  }
  byId("schema").addEventListener("change", checkSchema);
  byId("api-key").addEventListener("change", () => setKey(byId("api-key").value));
  byId("settings-open").addEventListener("click", () => {
    byId("api-key").value = apiKey();
    byId("settings").showModal();
  });
  byId("reset").addEventListener("click", () => {
    for (const name of [...NUMBERS, ...TEXTS]) byId(name).value = "";
    checkSchema();
    keep();
  });
  startTheme();
}

function keep() {
  const values = FIELDS.map((name) => [name, byId(name).value]);
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
