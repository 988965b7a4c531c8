// The arrows between the versions of a message, and what else both kinds of message have.

import { announce, el, iconButton } from "../dom.js";

/** Draw the arrows; null for a message of one version. */
export function drawVersions(message, thread) {
  const versions = thread.versions();
  if (versions.length < 2 || thread.isCompared) return null;
  const place = versions.indexOf(message);
  const arrow = (icon, name, to) =>
    iconButton(icon, `${name} version`, () => thread.show(versions[to]), { disabled: !versions[to] });
  return el(
    "div",
    { class: "versions", role: "group", "aria-label": "Versions" },
    arrow("before", "Previous", place - 1),
    el("span", {}, `${place + 1}/${versions.length}`),
    arrow("after", "Next", place + 1),
  );
}

/** Copy a text. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied.");
  } catch {
    announce("The browser does not allow copying here.");
  }
}
