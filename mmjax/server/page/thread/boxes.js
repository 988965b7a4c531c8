// Boxes and points in answers, as fractions of the picture, and their drawing over it.

import { el, svg } from "../dom.js";

const COLORS = ["#e11d48", "#2563eb", "#15803d", "#b45309", "#7c3aed", "#0e7490"];
const NUMBER = String.raw`\s*(\d{1,4})\s*`;
const POINT = String.raw`\(${NUMBER},${NUMBER}\)`;
const QWEN2 = new RegExp(
  String.raw`(?:<\|object_ref_start\|>([^<]*)<\|object_ref_end\|>)?(?:<\|box_start\|>)?${POINT},${POINT}(?:<\|box_end\|>)?`,
  "g",
);
const PALIGEMMA = /<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})>\s*([^<;\n]*)/g;
const GLM_BOXES = /<\|begin_of_box\|>([^]*?)<\|end_of_box\|>/g;
const FOUR = new RegExp(String.raw`\[${[NUMBER, NUMBER, NUMBER, NUMBER].join(",")}\]`, "g");
const JSON_LIST = /\[\s*\{[^]*?\}\s*\]|\{[^{}]*"(?:bbox|point)_2d"[^{}]*\}/g;
const MOLMO = /<points?\b([^<>]*?)(?:\/>|>([^<]*)<\/points?>)/g;
const MOLMO_POINT = /\bx(\d*)\s*=\s*"\s*([\d.]+)\s*"\s+y\1\s*=\s*"\s*([\d.]+)\s*"/g;
const PIXELS_PER_EMBED = 28;

/**
 * Return `{label, points}` for each object; points are `[x, y]`, from 0 to 1: the corners of its
 * outline, or the one point that shows it. `number`: the picture's, among all that were sent.
 *
 * `parsed`: the answer's field, in pixels. `item`: the picture's metrics. `unit`: what the model
 * counts corners in, as its card says: "pixels" of the resized picture, of which `item` tells the
 * size, or "thousandths" of its sides.
 */
export function findBoxes({ text, parsed, picture, item, unit, number = 1 }) {
  const size = unit === "thousandths" ? [1000, 1000] : resizedSize(picture, item);
  const found = [
    ...fromParsed(parsed, picture, number),
    ...fromJson(text, size),
    ...fromGlm(text, size),
    ...fromPaligemma(text),
    ...fromMolmo(text),
  ];
  return found.length ? found : fromQwen2(text);
}

function corners(left, top, right, bottom) {
  return [[left, top], [right, top], [right, bottom], [left, bottom]];
}

// The fields of an answer, or of an imported file, may be anything.
const listIn = (value) => (Array.isArray(value) ? value.filter(Array.isArray) : []);
const isNumbers = (value) => Array.isArray(value) && value.every(Number.isFinite);

function fromParsed(parsed, { width, height }, number) {
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
    add("bboxes", ([left, top, right, bottom]) => [corners(left, top, right, bottom).flat()]);
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

function fromJson(text, size) {
  const found = [];
  for (const [match] of text.matchAll(JSON_LIST)) {
    for (const one of [parseJson(match)].flat()) {
      const numbers = one?.bbox_2d ?? one?.point_2d;
      const count = one?.bbox_2d ? 4 : 2;
      if (!Array.isArray(numbers) || numbers.length !== count || !numbers.every(Number.isFinite)) continue;
      const placed = numbers.map((n, i) => n / size[i % 2]);
      found.push({ label: String(one.label ?? ""), points: count === 4 ? corners(...placed) : [placed] });
    }
  }
  return found;
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return [];
  }
}

/** Return the size after Qwen2.5-VL's resizing: the grid of as many embeddings nearest in shape. */
export function resizedSize({ width, height }, item) {
  const count = item?.num_embeds ?? 0;
  let best = [width, height];
  let nearest = 0.2;
  for (let columns = 1; columns <= count; columns += 1) {
    if (count % columns) continue;
    const distance = Math.abs(Math.log(columns ** 2 / count / (width / height)));
    if (distance < nearest) {
      nearest = distance;
      best = [columns * PIXELS_PER_EMBED, (count / columns) * PIXELS_PER_EMBED];
    }
  }
  return best;
}

/** Return what GLM-V answers: `<|begin_of_box|>[[1,2,3,4]]<|end_of_box|>`. */
function fromGlm(text, size) {
  const lists = [...text.matchAll(GLM_BOXES)].flatMap(([, inside]) => [...inside.matchAll(FOUR)]);
  return lists.flatMap(([, ...found]) => {
    const [left, top, right, bottom] = found.map((n, i) => Number(n) / size[i % 2]);
    return left < right && top < bottom ? [{ label: "", points: corners(left, top, right, bottom) }] : [];
  });
}

function fromPaligemma(text) {
  return [...text.matchAll(PALIGEMMA)].map(([, ...found]) => {
    const [top, left, bottom, right] = found.slice(0, 4).map((n) => Number(n) / 1024);
    return { label: found[4].trim(), points: corners(left, top, right, bottom) };
  });
}

/** Return Molmo's points, in hundredths: `<point x="10.5" y="20" alt="a cat">cat</point>`. */
function fromMolmo(text) {
  return [...text.matchAll(MOLMO)].flatMap(([, attributes, inside]) => {
    const label = (inside ?? /\balt\s*=\s*"([^"]*)"/.exec(attributes)?.[1] ?? "").trim();
    const placed = [...attributes.matchAll(MOLMO_POINT)].map((found) => found.slice(2).map((n) => n / 100));
    return placed.filter(([x, y]) => x <= 1 && y <= 1).map((point) => ({ label, points: [point] }));
  });
}

function fromQwen2(text) {
  const found = [];
  for (const match of text.matchAll(QWEN2)) {
    const [left, top, right, bottom] = match.slice(2, 6).map((n) => Number(n) / 1000);
    if (!(left < right && top < bottom && right <= 1 && bottom <= 1)) continue;
    const before = text.slice(0, match.index).split(/[\n)>]/).at(-1).trim();
    found.push({ label: (match[1] ?? before).trim(), points: corners(left, top, right, bottom) });
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
