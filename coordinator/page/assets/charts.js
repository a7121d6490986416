// Charts as plain SVG. Every text goes in as text, never as markup. A chart is an image with a name that says in words
// what it shows.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = {left: 52, right: 10, top: 8, bottom: 22};

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

function shape(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Round numbers that cover [low, high].
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  const first = Math.ceil(low / step - 1e-9) * step;
  const all = [];
  for (let tick = first; tick <= high + step * 1e-6; tick += step) all.push(Math.abs(tick) < step / 1e6 ? 0 : tick);
  return all;
}

const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});
export const short = (value) => compact.format(value);

// "2.500" as "2.5".
const brief = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

const tip = () => document.getElementById("tip");

function showTip(event, text) {
  const box = tip();
  box.textContent = text;
  box.hidden = false;
  const x = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
  const y = Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8);
  box.style.left = `${Math.max(8, x)}px`;
  box.style.top = `${Math.max(8, y)}px`;
}

export function hideTip() {
  tip().hidden = true;
}

// Axes of a plot of `width` x `height`: scales, and the group of lines and numbers.
function frame(width, height, [x0, x1], [y0, y1], format) {
  const inner = {w: Math.max(20, width - MARGIN.left - MARGIN.right), h: height - MARGIN.top - MARGIN.bottom};
  const x = (value) => MARGIN.left + (x1 > x0 ? (value - x0) / (x1 - x0) : 0.5) * inner.w;
  const y = (value) => MARGIN.top + (1 - (y1 > y0 ? (value - y0) / (y1 - y0) : 0.5)) * inner.h;
  const axes = shape("g", {});
  for (const tick of ticks(y0, y1, 5)) {
    axes.append(shape("line", {class: "gridline", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick)}),
                shape("text", {x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end"}, brief(format(tick))));
  }
  for (const tick of ticks(x0, x1, Math.max(2, Math.floor(inner.w / 90)))) {
    if (!Number.isInteger(tick)) continue;
    const atEdge = x(tick) > width - MARGIN.right - 16;
    axes.append(shape("text", {x: x(tick), y: height - 6, "text-anchor": atEdge ? "end" : "middle"}, short(tick)));
  }
  return {x, y, axes};
}

function nearest(points, at) {
  let best = 0;
  for (let i = 1; i < points.length; ++i) if (Math.abs(points[i] - at) < Math.abs(points[best] - at)) best = i;
  return best;
}

// The step under the pointer, with a line there and what `describe` says of it.
function follow(svg, width, height, steps, x, describe) {
  const line = shape("line", {class: "mark", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden"});
  svg.append(line);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * width;
    const index = nearest(steps.map(x), place);
    line.setAttribute("x1", x(steps[index]));
    line.setAttribute("x2", x(steps[index]));
    line.setAttribute("visibility", "visible");
    showTip(event, describe(index));
  });
  svg.addEventListener("pointerleave", () => {
    line.setAttribute("visibility", "hidden");
    hideTip();
  });
}

function legend(entries) {
  return el("ul", {class: "legend"}, ...entries.map(([name, color]) => {
    const key = el("i");
    key.style.background = color;
    return el("li", {}, key, name);
  }));
}

const color = (index) => `var(--s${index % 10})`;
const finite = (values) => values.filter(Number.isFinite);

function nothing(container, why) {
  container.replaceChildren(el("p", {class: "empty"}, why));
}

// Lines over steps. series: [{name, points: [[step, value]]}]; values that are no numbers leave gaps. `zero`: the axis
// begins at 0.
export function lineChart(container, {title, series, format = short, zero = false}) {
  const shown = series.filter(({points}) => points.some(([, value]) => Number.isFinite(value)));
  if (shown.length === 0) return nothing(container, "No steps yet.");
  const width = Math.max(260, container.clientWidth), height = 210;
  const steps = [...new Set(shown.flatMap(({points}) => points.map(([step]) => step)))].sort((a, b) => a - b);
  const values = finite(shown.flatMap(({points}) => points.map(([, value]) => value)));
  let low = zero ? 0 : Math.min(...values), high = Math.max(...values);
  const room = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
  if (!zero) low -= room;
  high += room;
  const {x, y, axes} = frame(width, height, [steps[0], steps.at(-1)], [low, high], format);
  const words = shown.map(({name, points}) => {
    const known = points.filter(([, value]) => Number.isFinite(value));
    return `${name} ${format(known[0][1])} at step ${known[0][0]}, ${format(known.at(-1)[1])} at step ${known.at(-1)[0]}`;
  });
  const svg = shape("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${words.join("; ")}`},
                    axes);
  shown.forEach(({points}, index) => {
    let path = "", pen = "M";
    for (const [step, value] of points) {
      if (!Number.isFinite(value)) {
        pen = "M";
        continue;
      }
      path += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    }
    const line = shape("path", {class: "series", d: path});
    line.style.stroke = color(index);
    svg.append(line);
    if (points.length === 1) {
      const dot = shape("circle", {cx: x(points[0][0]), cy: y(points[0][1]), r: 3});
      dot.style.fill = color(index);
      svg.append(dot);
    }
  });
  follow(svg, width, height, steps, x, (index) => [`step ${steps[index]}`, ...shown.map(({name, points}) => {
    const at = points[nearest(points.map(([step]) => step), steps[index])];
    return `${name}: ${format(at[1])}`;
  })].join("\n"));
  container.replaceChildren(svg, ...(shown.length > 1 ? [legend(shown.map(({name}, i) => [name, color(i)]))] : []));
}

// Shares of a whole over steps, one on the other. layers: [{name, values}] with a value a step.
export function areaChart(container, {title, steps, layers, format = short}) {
  const shown = layers.filter(({values}) => values.some((value) => value > 0));
  if (steps.length === 0 || shown.length === 0) return nothing(container, "No steps yet.");
  const width = Math.max(260, container.clientWidth), height = 210;
  const tops = [steps.map(() => 0)];
  for (const {values} of shown) tops.push(values.map((value, i) => tops.at(-1)[i] + (Number.isFinite(value) ? value : 0)));
  const {x, y, axes} = frame(width, height, [steps[0], steps.at(-1)], [0, Math.max(...tops.at(-1)) * 1.05], format);
  const words = shown.map(({name, values}) => `${name} ${format(values.at(-1))}`);
  const svg = shape("svg", {viewBox: `0 0 ${width} ${height}`, role: "img",
                            "aria-label": `${title}, at step ${steps.at(-1)}: ${words.join(", ")}`}, axes);
  const at = (i) => steps.length > 1 ? x(steps[i]) : (i === 0 ? MARGIN.left : width - MARGIN.right);
  shown.forEach((layer, index) => {
    const up = steps.map((_, i) => `${at(i).toFixed(1)} ${y(tops[index + 1][i]).toFixed(1)}`);
    const down = steps.map((_, i) => `${at(i).toFixed(1)} ${y(tops[index][i]).toFixed(1)}`).reverse();
    const area = shape("path", {class: "area", d: `M${[...up, ...down].join("L")}Z`});
    area.style.fill = color(index);
    svg.append(area);
  });
  follow(svg, width, height, steps, x, (index) =>
    [`step ${steps[index]}`, ...shown.map(({name, values}) => `${name}: ${format(values[index])}`)].join("\n"));
  container.replaceChildren(svg, legend(shown.map(({name}, i) => [name, color(i)])));
}

// A row of cells for each of `rows`, a column for each of `columns`. values[row][column]; undefined leaves a cell empty.
export function heatMap(container, {title, what, rowName, rows, columnName = "step", columns, values, format, bounds}) {
  const all = finite(values.flat());
  if (all.length === 0) return nothing(container, "Not reported.");
  const [low, high] = bounds ?? [Math.min(...all), Math.max(...all)];
  const width = Math.max(260, container.clientWidth), left = 40, bottom = 22;
  const cell = {w: (width - left - MARGIN.right) / columns.length, h: Math.max(4, Math.min(18, 240 / rows.length))};
  const height = Math.ceil(rows.length * cell.h) + bottom + 4;
  const mean = all.reduce((sum, value) => sum + value, 0) / all.length;
  const svg = shape("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${title}: ${rows.length} ${rowName}s over ${columnName}s ${columns[0]} to ${columns.at(-1)}; ` +
      `${what} from ${format(Math.min(...all))} to ${format(Math.max(...all))}, mean ${format(mean)}`});
  values.forEach((row, r) => row.forEach((value, c) => {
    if (!Number.isFinite(value)) return;
    const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0.5;
    const rect = shape("rect", {x: (left + c * cell.w).toFixed(2), y: (4 + r * cell.h).toFixed(2),
                                width: (cell.w + 0.4).toFixed(2), height: (cell.h - (cell.h > 6 ? 1 : 0)).toFixed(2)});
    rect.style.fill = `color-mix(in oklab, var(--hot) ${(share * 100).toFixed(1)}%, var(--cold))`;
    svg.append(rect);
  }));
  const each = Math.ceil(14 / cell.h);
  rows.forEach((name, r) => {
    if (r % each === 0) {
      svg.append(shape("text", {x: left - 6, y: 4 + (r + 0.5) * cell.h + 4, "text-anchor": "end"}, String(name)));
    }
  });
  const stride = Math.max(1, Math.ceil(columns.length / Math.max(2, Math.floor((width - left) / 80))));
  columns.forEach((name, c) => {
    if (c % stride === 0) {
      svg.append(shape("text", {x: left + (c + 0.5) * cell.w, y: height - 6, "text-anchor": "middle"}, short(name)));
    }
  });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const c = Math.floor(((event.clientX - box.left) / box.width * width - left) / cell.w);
    const r = Math.floor(((event.clientY - box.top) / box.height * height - 4) / cell.h);
    const value = values[r]?.[c];
    if (!Number.isFinite(value)) return hideTip();
    showTip(event, `${columnName} ${columns[c]}, ${rowName} ${rows[r]}\n${what}: ${format(value)}`);
  });
  svg.addEventListener("pointerleave", hideTip);
  container.replaceChildren(svg, el("p", {class: "scale"}, format(low), el("i"), format(high), ` ${what}`));
}
