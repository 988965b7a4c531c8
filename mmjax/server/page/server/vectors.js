// A server of vectors writes no answers: what it is for, in place of the chat.

import { byId, el, iconButton } from "../dom.js";
import { copy } from "../thread/versions.js";
import { apiKey } from "./key.js";
import { capabilities, chosenModel } from "./models.js";

const DOCUMENTS = ["a red circle on a white ground", "two cats asleep on a sofa"];

/** Show commands that the server answers, where it gives vectors. */
export function showVectors() {
  const isShown = capabilities().output_modalities?.includes("embeddings") ?? false;
  document.body.toggleAttribute("data-vectors", isShown);
  byId("vectors").hidden = !isShown;
  if (!isShown) return;
  byId("thread").ariaLabel = "What this server is for";
  const isOne = capabilities().pooling_task !== "token_embed";
  byId("vectors").replaceChildren(
    el("h2", {}, "This server gives vectors"),
    el("p", {}, el("b", {}, chosenModel()), isOne ? " makes a vector of a text or a picture, " : " makes a vector of each token of a text or a picture, ", "and says how alike two of them are. It writes no answers."),
    ...(isOne ? example("A vector for each text", "v1/embeddings", { input: DOCUMENTS }) : example("The vectors of each text", "pooling", { input: DOCUMENTS })),
    ...example("The documents that fit a question best", "rerank", { query: "Which one shows a pet?", documents: DOCUMENTS }),
    ...example("How alike two texts are", "score", { text_1: "Which one shows a pet?", text_2: DOCUMENTS[1] }),
  );
}

function example(title, route, fields) {
  const body = JSON.stringify({ model: chosenModel(), ...fields }).replaceAll("'", "'\\''");
  const key = apiKey() ? ' -H "Authorization: Bearer $MMJAX_API_KEY"' : "";
  const command = `curl ${new URL(route, document.baseURI)} -H "Content-Type: application/json"${key} -d '${body}'`;
  return [
    el("h3", {}, title, " ", el("code", {}, `/${route}`)),
    el("div", { class: "command" }, el("pre", {}, el("code", {}, command)), iconButton("copy", `Copy the command of /${route}`, () => copy(command))),
  ];
}
