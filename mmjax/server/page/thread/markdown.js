// A small part of Markdown as DOM nodes. Text of a model is text: HTML in it is shown, not parsed.

import { el } from "../dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ROW_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE =
  /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/;

/** Return the nodes of a text. */
export function markdown(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"));
}

function blocks(lines) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at);
    if (node) nodes.push(node);
    at = next;
  }
  return nodes;
}

function block(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (FENCE.test(line)) return code(lines, at);
  const heading = HEADING.exec(line);
  if (heading) {
    // The page's own headings are h1 and h2.
    const level = Math.min(6, heading[1].length + 2);
    return [el(`h${level}`, {}, inline(heading[2])), at + 1];
  }
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (QUOTE.test(line)) {
    const end = until(lines, at, (one) => !QUOTE.test(one));
    const inner = lines.slice(at, end).map((one) => one.replace(QUOTE, ""));
    return [el("blockquote", {}, blocks(inner)), end];
  }
  if (ITEM.test(line)) return list(lines, at);
  if (line.includes("|") && ROW_RULE.test(lines[at + 1] ?? "")) return table(lines, at);
  const end = until(lines, at + 1, (one) => !one.trim() || begins(one));
  return [el("p", {}, inline(lines.slice(at, end).join("\n"))), end];
}

function begins(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

function until(lines, at, isOver) {
  let end = at;
  while (end < lines.length && !isOver(lines[end])) end += 1;
  return end;
}

function code(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const end = until(lines, at + 1, (one) => one.trim().startsWith(fence) && !one.trim().slice(fence.length));
  const text = lines.slice(at + 1, end).join("\n");
  const label = language ? `Code in ${language}` : "Code";
  const node = el("pre", { tabindex: "0", role: "region", "aria-label": label }, el("code", {}, text));
  return [node, end + 1];
}

function list(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const node = el(isOrdered ? "ol" : "ul", isOrdered ? { start: parseInt(mark, 10) } : {});
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== isOrdered) break;
    const width = indent.length + 1;
    const end = until(lines, at + 1, (one) => one.trim() && one.search(/\S/) < width);
    const rest = lines.slice(at + 1, end).map((one) => one.slice(Math.min(width + 1, one.search(/\S|$/))));
    node.append(el("li", {}, inline(item[3]), blocks(rest)));
    at = end;
  }
  return [node, at];
}

function table(lines, at) {
  const end = until(lines, at, (one) => !one.includes("|"));
  const row = (line, tag) =>
    el("tr", {}, line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => el(tag, {}, inline(cell.trim()))));
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const node = el("table", {}, el("thead", {}, row(lines[at], "th")), el("tbody", {}, body));
  return [el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, node), end];
}

function inline(text) {
  const nodes = [];
  for (let found = INLINE.exec(text); found; found = INLINE.exec(text)) {
    nodes.push(text.slice(0, found.index), span(found));
    text = text.slice(found.index + found[0].length);
  }
  return [...nodes, text];
}

function span([, , literal, strong, emphasis, label, address]) {
  if (literal !== undefined) return el("code", {}, literal.trim());
  if (strong !== undefined) return el("strong", {}, inline(strong));
  if (emphasis !== undefined) return el("em", {}, inline(emphasis));
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}
