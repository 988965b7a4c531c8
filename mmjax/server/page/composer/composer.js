// The message box: text and media of the next question, and the tasks of the model.

import { pictureOf, remember } from "../conversation/kept.js";
import { announce, byId, el, iconButton } from "../dom.js";
import { describeTaken, drawExample, readMedia, thumbnail } from "./media.js";
import { canRecord, startRecorder } from "./recorder.js";
import { capabilities, takes } from "../server/models.js";

const HINT = "Enter sends, Shift and Enter begins a line";
const NAME = "mmjax.draft"; // of the text that is being written, for a reload
const isFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");

const left = new Map(); // id of a conversation -> its {text, drafts} while another one is open
let drafts = [];
let page = null;

/** `own`: `ask(text, pictures)` returns whether it is asked; `stop`, and `changed` of the drafts. */
export function startComposer(own) {
  page = own;
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  const box = byId("question");
  box.addEventListener("input", () => {
    fitQuestion();
    showProblem("");
    sessionStorage.setItem(NAME, box.value);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  byId("stop").addEventListener("click", page.stop);
  startFiles();
  startDropping();
  startRecorder((file) => addFiles([file]), showProblem);
  writeText(sessionStorage.getItem(NAME) ?? "");
}

function startFiles() {
  byId("attach").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", async () => {
    await addFiles([...byId("files").files]);
    byId("files").value = "";
    byId("question").focus();
  });
  byId("example").addEventListener("click", async () => {
    await addFiles([await drawExample()]);
    writeText("What color is the circle?");
    byId("question").focus();
  });
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    addFiles(files);
  });
}

function startDropping() {
  let depth = 0;
  const show = (change) => {
    depth = Math.max(0, depth + change);
    byId("drop").hidden = !depth;
  };
  document.addEventListener("dragenter", (event) => isFile(event) && show(1));
  document.addEventListener("dragleave", (event) => isFile(event) && show(-1));
  document.addEventListener("dragover", (event) => isFile(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    show(-depth);
    addFiles([...event.dataTransfer.files]);
  });
}

/** Return the media of the question that is being written. */
export const draftedMedia = () => drafts;

/** Put aside what is written in the conversation `from`, and take up what was written in `to`. */
export function changeDraft(from, to) {
  left.set(from, { text: byId("question").value, drafts });
  const own = left.get(to) ?? { text: "", drafts: [] };
  drafts = own.drafts;
  writeText(own.text);
  showProblem("");
  drawDrafts();
}

async function addFiles(files) {
  const { media, problems } = await readMedia(files, takes);
  for (const { blob, ...medium } of media) {
    remember({ id: medium.id, blob });
    drafts.push(medium);
  }
  drawDrafts();
  if (media.length) announce(`${drafts.length} ${drafts.length === 1 ? "file" : "files"} to send.`);
  showProblem(problems.join(" "));
}

/** Show what is wrong with the next question, until that changes. */
export function showProblem(text) {
  byId("hint").textContent = text || HINT;
  byId("hint").classList.toggle("problem", Boolean(text));
  if (text) announce(text);
}

function drawDrafts() {
  const rows = drafts.map((medium, index) =>
    el(
      "li",
      {},
      thumbnail(medium, pictureOf(medium.id).address, { width: 64, height: 64 }),
      iconButton("close", `Remove ${medium.name}`, () => {
        drafts.splice(index, 1);
        drawDrafts();
        showProblem("");
        byId("question").focus();
      }),
    ),
  );
  byId("drafts").replaceChildren(...rows);
  page.changed();
}

/** Offer what the model takes: the tasks of its card, each of which writes its text, and media. */
export function showAbilities() {
  const rows = Object.entries(capabilities().tasks ?? {}).map(([name, prompt]) =>
    el("button", { type: "button", title: prompt, click: () => writeTask(prompt) }, name),
  );
  byId("tasks").replaceChildren(...rows);
  byId("files").accept = ["image", "video", "audio"].filter(takes).map((kind) => `${kind}/*`).join(",");
  const name = `Add ${describeTaken(takes)}`;
  byId("attach").ariaLabel = name;
  byId("attach").title = name;
  byId("record").hidden = !takes("audio") || !canRecord();
  if (takes("image")) return;
  byId("example").hidden = true;
  byId("empty").querySelector("h2").textContent = "Ask about a clip";
  byId("empty").querySelector("p").textContent = "Record, drop or pick one clip or several, and ask.";
  byId("question").placeholder = "Ask about what is heard";
}

function writeTask(prompt) {
  writeText(prompt);
  const box = byId("question");
  box.focus();
  const own = prompt.match(/\{[^}]*\}/); // the words that are the asker's own
  if (own) box.setSelectionRange(own.index, own.index + own[0].length);
}

function writeText(text) {
  byId("question").value = text;
  sessionStorage.setItem(NAME, text);
  fitQuestion();
}

function fitQuestion() {
  const box = byId("question");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight, innerHeight * 0.4)}px`;
}

function submit() {
  const text = byId("question").value.trim();
  if ((!text && !drafts.length) || !page.ask(text, drafts)) return;
  drafts = [];
  writeText("");
  drawDrafts();
  showProblem("");
}

/** Show the button that stops the answer, or the one that sends. */
export function showRunning(isRunning) {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  if (hadFocus) (isRunning ? byId("stop") : byId("question")).focus();
}
