// The page: the conversation, the message box, the list of conversations.

import { getModel, getReady, ServerError, streamChat } from "./api.js";
import { el, iconButton } from "./dom.js";
import { requestMessages } from "./history.js";
import { drawMessage, fillAnswer } from "./messages.js";
import { drawExample, randomId, readPictures, toDataUrl } from "./pictures.js";
import { sampling, showSettings, startSettings, systemPrompt } from "./settings.js";
import * as store from "./store.js";

const byId = (id) => document.getElementById(id);
const isFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");

const pictures = new Map(); // id -> {id, blob, address}
let conversations = [];
let current = newConversation();
let drafts = []; // {id, name, width, height} of the message that is being written
let running = null; // {abort, message} while an answer is streamed
let model = null;
let isKept = true;

function newConversation() {
  return { id: randomId(), title: "New conversation", updated: 0, messages: [] };
}

// ---- conversations -----------------------------------------------------------------------------

async function keep(change) {
  try {
    await change();
  } catch {
    if (isKept) announce("This browser does not keep conversations here; they end with the page.");
    isKept = false;
  }
}

async function save() {
  current.updated = Date.now();
  const conversation = structuredClone(current);
  const list = conversation.messages.flatMap((message) => message.pictures ?? []);
  localStorage.setItem("mmjax.conversation", conversation.id);
  conversations = [current, ...conversations.filter((one) => one.id !== current.id)];
  drawConversations();
  await keep(async () => {
    await store.writePictures(conversation.id, list.map(({ id }) => ({ id, blob: pictures.get(id).blob })));
    await store.writeConversation(conversation);
  });
}

async function openConversation(conversation) {
  stop();
  current = conversation;
  localStorage.setItem("mmjax.conversation", current.id);
  await keep(async () => {
    for (const { id, blob } of await store.readPictures(current.id)) remember({ id, blob });
  });
  drawConversations();
  drawThread();
  byId("thread").scrollTop = byId("thread").scrollHeight;
}

function remember({ id, blob }) {
  if (!pictures.has(id)) pictures.set(id, { id, blob, address: URL.createObjectURL(blob) });
}

async function removeConversation(conversation) {
  if (!confirm(`Delete \u201c${conversation.title}\u201d?`)) return;
  conversations = conversations.filter((one) => one !== conversation);
  await keep(() => store.deleteConversation(conversation.id));
  if (conversation === current) startConversation();
  else drawConversations();
  announce("The conversation was deleted.");
}

function renameConversation(conversation, row) {
  const box = el("input", { value: conversation.title, "aria-label": "Title", maxlength: 120 });
  const finish = async (isTaken) => {
    const title = box.value.trim();
    if (isTaken && title && title !== conversation.title) {
      conversation.title = title;
      await keep(() => store.writeConversation(structuredClone(conversation)));
    }
    drawConversations();
    byId("title").textContent = current.title;
    byId("conversations").querySelector(`[data-id="${conversation.id}"] button`)?.focus();
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) finish(true);
    if (event.key === "Escape") finish(false);
  });
  box.addEventListener("change", () => finish(true));
  row.replaceChildren(box);
  box.focus();
  box.select();
}

function drawConversations() {
  const rows = conversations.map((conversation) => {
    const isCurrent = conversation === current;
    const row = el(
      "li",
      { "data-id": conversation.id },
      el(
        "button",
        { type: "button", class: "open", "aria-current": isCurrent ? "true" : null, click: async () => {
          await openConversation(conversation);
          showSidebar(false);
          byId("question").focus();
        } },
        conversation.title,
      ),
      iconButton("rename", `Rename \u201c${conversation.title}\u201d`, () => renameConversation(conversation, row)),
      iconButton("remove", `Delete \u201c${conversation.title}\u201d`, () => removeConversation(conversation)),
    );
    return row;
  });
  byId("conversations").replaceChildren(...rows);
}

function startConversation() {
  stop();
  current = newConversation();
  localStorage.removeItem("mmjax.conversation");
  drawConversations();
  drawThread();
}

// ---- the thread --------------------------------------------------------------------------------

function drawThread() {
  byId("title").textContent = current.title;
  byId("empty").hidden = current.messages.length > 0;
  byId("messages").replaceChildren(...current.messages.map((_, index) => drawOne(index)));
}

function drawOne(index) {
  const message = current.messages[index];
  return drawMessage(message, {
    addressOf: (id) => pictures.get(id)?.address,
    lastPictures: () => current.messages.slice(0, index).findLast((one) => one.pictures?.length)?.pictures ?? [],
    allPictures: () => requestParts(index).flatMap((one) => one.pictures ?? []),
    requestMessages: () => requestMessages(requestParts(index), message.system ?? "", dataUrlOf),
    boxUnit: () => model?.capabilities?.box_unit,
    isRunning: running?.message === message,
    edit: (text, kept) => resend(index, text, kept),
    again: () => answerFrom(index),
    announce,
  });
}

/** Return the messages that the answer at `index` was asked with: not those that failed. */
function requestParts(index) {
  return current.messages.slice(0, index).filter((message, place) => {
    const answer = message.role === "user" ? current.messages[place + 1] : message;
    return place === index - 1 || Boolean(answer?.text);
  });
}

const dataUrlOf = (id) => toDataUrl(pictures.get(id).blob);

function isAtBottom() {
  const thread = byId("thread");
  return thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
}

function follow(wasAtBottom) {
  if (wasAtBottom) byId("thread").scrollTop = byId("thread").scrollHeight;
}

function announce(text) {
  byId("live").textContent = text;
}

// ---- asking ------------------------------------------------------------------------------------

async function ask(text, list) {
  if (running || (!text && !list.length)) return;
  if (!current.messages.length) current.title = (text || list[0].name).split("\n")[0].slice(0, 60);
  current.messages.push({ role: "user", text, pictures: list });
  await answerFrom(current.messages.length);
}

async function resend(index, text, list) {
  current.messages.length = index;
  await ask(text, list);
}

/** Stream the answer at `index`; what stood from there on is gone. */
async function answerFrom(index) {
  stop();
  const conversation = current;
  conversation.messages.length = index;
  const message = { role: "assistant", text: "", state: "running", system: systemPrompt() };
  conversation.messages.push(message);
  running = { abort: new AbortController(), message };
  const own = running;
  showRunning();
  drawThread();
  byId("thread").scrollTop = byId("thread").scrollHeight;
  save();
  announce("Answering.");
  try {
    const messages = await requestMessages(requestParts(index), message.system, dataUrlOf);
    const body = { ...sampling(), messages, return_metrics: true };
    for await (const chunk of streamChat(body, own.abort.signal)) take(message, chunk);
    message.state = "done";
  } catch (error) {
    fail(message, error);
  }
  if (running === own) running = null;
  showRunning();
  if (current === conversation) {
    redrawLast(message);
    save();
    announce(message.state === "done" ? `Answer: ${message.text}` : message.state === "stopped" ? "Stopped." : "");
  } else {
    await keep(() => store.writeConversation(structuredClone(conversation)));
  }
}

function take(message, chunk) {
  for (const { delta, finish_reason: reason } of chunk.choices) {
    message.text += delta.content ?? "";
    message.parsed = delta.parsed ?? message.parsed;
    message.finish = reason ?? message.finish;
  }
  message.usage = chunk.usage ?? message.usage;
  message.metrics = chunk.metrics ?? message.metrics;
  message.frame ??= requestAnimationFrame(() => {
    delete message.frame;
    const wasAtBottom = isAtBottom();
    const node = byId("messages").lastElementChild;
    if (current.messages.at(-1) === message && node) fillAnswer(node, message);
    follow(wasAtBottom);
  });
}

function fail(message, error) {
  if (error.name === "AbortError") {
    message.state = "stopped";
    return;
  }
  message.state = "failed";
  const known = error instanceof ServerError ? error : { message: "The page failed on this answer." };
  const { status, param, code, requestId } = known;
  message.error = { message: known.message, status, param, code, requestId };
  if (status === 401) showSettings(known.message);
}

function redrawLast(message) {
  cancelAnimationFrame(message.frame);
  delete message.frame;
  const wasAtBottom = isAtBottom();
  const index = current.messages.indexOf(message);
  if (index >= 0) byId("messages").children[index]?.replaceWith(drawOne(index));
  follow(wasAtBottom);
}

function stop() {
  running?.abort.abort();
}

function showRunning() {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = Boolean(running);
  byId("stop").hidden = !running;
  if (hadFocus) (running ? byId("stop") : byId("question")).focus();
}

// ---- the message box ---------------------------------------------------------------------------

async function addFiles(files) {
  const read = await readPictures(files, announceProblem);
  for (const { blob, ...picture } of read) {
    remember({ id: picture.id, blob });
    drafts.push(picture);
  }
  drawDrafts();
  if (read.length) announce(`${drafts.length} ${drafts.length === 1 ? "picture" : "pictures"} to send.`);
}

function announceProblem(text) {
  byId("hint").textContent = text;
  byId("hint").classList.add("problem");
  announce(text);
}

function drawDrafts() {
  const rows = drafts.map((picture, index) =>
    el(
      "li",
      {},
      el("img", { src: pictures.get(picture.id).address, alt: picture.name, width: 64, height: 64 }),
      iconButton("close", `Remove ${picture.name}`, () => {
        drafts.splice(index, 1);
        drawDrafts();
        byId("question").focus();
      }),
    ),
  );
  byId("drafts").replaceChildren(...rows);
}

/** Offer the tasks that the model's card names: each writes its text into the message box. */
function drawTasks() {
  const rows = Object.entries(model?.capabilities?.tasks ?? {}).map(([name, prompt]) =>
    el("button", { type: "button", title: prompt, click: () => writeTask(prompt) }, name),
  );
  byId("tasks").replaceChildren(...rows);
}

function writeTask(prompt) {
  const box = byId("question");
  box.value = prompt;
  fitQuestion();
  box.focus();
  const own = prompt.match(/\{[^}]*\}/); // the words that are the asker's own
  if (own) box.setSelectionRange(own.index, own.index + own[0].length);
}

function fitQuestion() {
  const box = byId("question");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight, innerHeight * 0.4)}px`;
}

function submit() {
  const text = byId("question").value.trim();
  if (running || (!text && !drafts.length)) return;
  const list = drafts;
  drafts = [];
  byId("question").value = "";
  fitQuestion();
  drawDrafts();
  ask(text, list);
}

function startComposer() {
  const box = byId("question");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  box.addEventListener("input", fitQuestion);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  byId("stop").addEventListener("click", stop);
  byId("attach").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", async () => {
    await addFiles([...byId("files").files]);
    byId("files").value = "";
    box.focus();
  });
  byId("example").addEventListener("click", async () => {
    await addFiles([await drawExample()]);
    box.value = "What color is the circle?";
    fitQuestion();
    box.focus();
  });
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    addFiles(files);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
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

// ---- the frame ---------------------------------------------------------------------------------

function showSidebar(isShown) {
  const wasShown = document.body.classList.contains("menu");
  document.body.classList.toggle("menu", isShown);
  byId("scrim").hidden = !isShown;
  byId("menu-open").setAttribute("aria-expanded", String(isShown));
  byId("main").inert = isShown;
  if (isShown) byId("menu-close").focus();
  else if (wasShown) byId("menu-open").focus();
}

function startFrame() {
  byId("menu-open").addEventListener("click", () => showSidebar(true));
  byId("menu-close").addEventListener("click", () => showSidebar(false));
  byId("scrim").addEventListener("click", () => showSidebar(false));
  byId("sidebar").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && document.body.classList.contains("menu")) showSidebar(false);
  });
  byId("new").addEventListener("click", () => {
    startConversation();
    showSidebar(false);
    byId("question").focus();
  });
  byId("messages").addEventListener("click", ({ target }) => {
    if (!target.matches("button.thumbnail img")) return;
    byId("viewer-image").src = target.src;
    byId("viewer-image").alt = target.alt;
    byId("viewer").showModal();
  });
  byId("viewer").addEventListener("click", ({ target }) => target === byId("viewer") && target.close());
}

function showStatus(state, text) {
  byId("status").dataset.state = state;
  if (byId("status-text").textContent !== text) byId("status-text").textContent = text;
}

/** Ask for the server's state until all its programs are compiled, and rarely after that. */
async function watchServer() {
  let wait = 1000;
  try {
    const ready = await getReady();
    const numLeft = ready.num_programs_left ?? 0;
    if (!ready.isReady) {
      showStatus("busy", ready.status === "starting" ? "Starting: the model is loaded and compiled" : `The engine is ${ready.status}`);
    } else {
      if (!model) {
        model = await getModel().catch(() => null);
        drawTasks();
      }
      const name = model?.id ?? "Ready";
      showStatus(numLeft ? "busy" : "ready", numLeft ? `${name}: compiling, ${numLeft} programs left` : name);
      if (!numLeft) wait = 15000;
    }
  } catch {
    showStatus("off", "The server cannot be reached");
    wait = 3000;
  }
  setTimeout(watchServer, wait);
}

async function start() {
  startSettings(() => {
    model = null;
  });
  startComposer();
  startDropping();
  startFrame();
  watchServer();
  await keep(async () => {
    conversations = await store.listConversations();
  });
  const id = localStorage.getItem("mmjax.conversation");
  const last = conversations.find((one) => one.id === id);
  if (last) await openConversation(last);
  else drawConversations();
  document.body.dataset.started = "true";
}

start();
