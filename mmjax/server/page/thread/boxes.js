// Boxes and points in answers, as fractions of the picture, and their drawing over it.

import { el, svg } from "../dom.js";

const COLORS = ["#e11d48", "#2563eb", "#15803d", "#b45309", "#7c3aed", "#0e7490"];

// The fields of an answer, or of an imported file, may be anything.
const listIn = (value) => (Array.isArray(value) ? value.filter(Array.isArray) : []);
const isNumbers = (value) => Array.isArray(value) && value.every(Number.isFinite);

/**
 * Return `{label, points}` for each object of an answer's `parsed`, which is in pixels. Points are
 * `[x, y]`, from 0 to 1: the corners of its outline, or the one point that shows it. `number`: the
 * picture's, among all that were sent.
 */
export function findBoxes({ parsed, picture: { width, height }, number = 1 }) {
  const found = [];
  for (const answer of Object.values(parsed ?? {})) {
    if (typeof answer !== "object" || !answer) continue;
    const add = (name, toOutlines) => {
      const labels = answer.labels ?? answer[`${name}_labels`] ?? [];
      listIn(answer[name]).forEach((one, index) => {
        for (const flat of toOutlines(one).filter(isNumbers)) {
          const points = flat.flatMap((x, i) => (i % 2 ? [] : [[x / width, flat[i + 1] / height]]));
          if (points.length > 1) found.push({ label: String(labels[index] ?? ""), points });
        }
      });
    };
    add("bboxes", ([left, top, right, bottom]) => [[left, top, right, top, right, bottom, left, bottom]]);
    add("quad_boxes", (quad) => [quad]);
    add("polygons", (polygons) => polygons);
    listIn(answer.points).forEach((point, index) => {
      if ((answer.images?.[index] ?? number) !== number || !isNumbers(point)) return;
      const [x, y] = point;
      found.push({ label: String(answer.labels?.[index] ?? ""), points: [[x / width, y / height]] });
    });
  }
  return found;
}

/** Return a figure: the picture, with the outlines and labels over it. */
export function drawBoxes(address, { width, height, name }, boxes) {
  const colors = new Map();
  const scale = Math.max(width, height) / 500;
  const canvas = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const { label, points } of boxes) {
    if (!colors.has(label)) colors.set(label, COLORS[colors.size % COLORS.length]);
    const stroke = colors.get(label);
    const placed = points.map(([x, y]) => [x * width, y * height]);
    const [[left, top]] = placed;
    canvas.append(
      placed.length > 1
        ? svg("polygon", { points: placed.join(" "), fill: "none", stroke, "stroke-width": 3 * scale })
        : svg("circle", { cx: left, cy: top, r: 7 * scale, fill: stroke, stroke: "#fff", "stroke-width": 2 * scale }),
    );
    if (!label) continue;
    const [x, y] = placed.length > 1 ? [left, top] : [left + 9 * scale, top + 9 * scale];
    const size = 13 * scale;
    const tag = { x, y: Math.max(0, y - 1.5 * size), width: (0.62 * label.length + 0.8) * size };
    canvas.append(
      svg("rect", { ...tag, height: 1.5 * size, fill: stroke }),
      svg("text", { x: x + 0.4 * size, y: tag.y + 1.1 * size, "font-size": size, fill: "#fff" }, label),
    );
  }
  const isPoints = boxes.every(({ points }) => points.length === 1);
  const noun = isPoints ? "point" : "object";
  const labels = boxes.map((box) => box.label || "unnamed").join(", ");
  return el(
    "figure",
    { class: "boxes" },
    el("div", {}, el("img", { src: address, alt: `${name} with ${isPoints ? "points" : "boxes"}: ${labels}`, width, height }), canvas),
    el("figcaption", {}, `${boxes.length} ${noun}${boxes.length === 1 ? "" : "s"} found`),
  );
}
