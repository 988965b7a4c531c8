// The list of conversations: search, rename, delete, export and import.

import { isRunning } from "./answers.js";
import { conversations, readPicturesOf, remove, save, search, writeDown, remember } from "./conversation/kept.js";
import { fromFile, toFile } from "./conversation/transfer.js";
import { announce, byId, el, iconButton } from "./dom.js";

let page = null;

/** `own`: `current()`, and `open`, `start` and `renamed`, called with conversations. */
export function startSidebar(own) {
  page = own;
  byId("menu-open").addEventListener("click", () => showSidebar(true));
  byId("menu-close").addEventListener("click", () => showSidebar(false));
  byId("scrim").addEventListener("click", () => showSidebar(false));
  byId("sidebar").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && document.body.classList.contains("menu")) showSidebar(false);
  });
  byId("new").addEventListener("click", () => {
    page.start();
    leave();
  });
  byId("search").addEventListener("input", () => {
    drawConversations();
    announce(`${listed().length} found.`);
  });
  byId("export").addEventListener("click", exportListed);
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", importFile);
}

function showSidebar(isShown) {
  const wasShown = document.body.classList.contains("menu");
  document.body.classList.toggle("menu", isShown);
  byId("scrim").hidden = !isShown;
  byId("menu-open").setAttribute("aria-expanded", String(isShown));
  byId("main").inert = isShown;
  if (isShown) byId("menu-close").focus();
  else if (wasShown) byId("menu-open").focus();
}

function leave() {
  showSidebar(false);
  byId("question").focus();
}

const listed = () => search(byId("search").value);

/** Draw the conversations that the search finds. */
export function drawConversations() {
  byId("conversations").replaceChildren(...listed().map(drawRow));
  const isSearch = Boolean(byId("search").value.trim());
  byId("search-box").hidden = conversations().length < 2 && !isSearch;
  byId("none-found").hidden = !isSearch || listed().length > 0;
  byId("export").disabled = !listed().length;
  byId("export").textContent = isSearch ? "Export these" : "Export all";
}

function drawRow(conversation) {
  const { title } = conversation;
  const isAnswered = conversation.messages.some(isRunning);
  const open = el(
    "button",
    { type: "button", class: "open", "aria-current": conversation === page.current() ? "true" : null, click: async () => {
      await page.open(conversation);
      leave();
    } },
    title,
    isAnswered ? el("span", { class: "running" }, el("span", { class: "hidden" }, " (is answered)")) : null,
  );
  const row = el(
    "li",
    { "data-id": conversation.id },
    open,
    iconButton("rename", `Rename \u201c${title}\u201d`, () => rename(conversation, row)),
    iconButton("remove", `Delete \u201c${title}\u201d`, () => deleteOne(conversation)),
  );
  return row;
}

async function deleteOne(conversation) {
  if (!confirm(`Delete \u201c${conversation.title}\u201d?`)) return;
  await remove(conversation);
  page.deleted(conversation);
  drawConversations();
  announce("The conversation was deleted.");
}

function rename(conversation, row) {
  const box = el("input", { value: conversation.title, "aria-label": "Title", maxlength: 120 });
  const finish = async (isTaken) => {
    const title = box.value.trim();
    if (isTaken && title && title !== conversation.title) {
      conversation.title = title;
      await writeDown(conversation);
    }
    drawConversations();
    page.renamed(conversation);
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

async function exportListed() {
  const chosen = listed();
  for (const conversation of chosen) await readPicturesOf(conversation);
  const file = await toFile(chosen);
  const link = el("a", { href: URL.createObjectURL(file), download: "mmjax-conversations.json" });
  link.click();
  URL.revokeObjectURL(link.href);
  announce(`${chosen.length} exported.`);
}

async function importFile() {
  const [file] = byId("import-file").files;
  byId("import-file").value = "";
  if (!file) return;
  try {
    const read = fromFile(await file.text());
    for (const { conversation, pictures } of read.reverse()) {
      pictures.forEach(remember);
      await save(conversation);
    }
    showImported("", `${read.length} imported.`);
  } catch (error) {
    showImported(`${file.name} was not imported: ${error.message}`);
  }
  drawConversations();
}

function showImported(problem, done = "") {
  byId("import-problem").textContent = problem;
  byId("import-problem").hidden = !problem;
  announce(problem || done);
}
