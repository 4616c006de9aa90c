// -- drawing ----------------------------------------------------------------------------------------

const inView = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting} of entries) {
    if (isIntersecting) near.add(target); else near.delete(target);
    if (isIntersecting && !drawn.has(target)) draw(target);
  }
}, {rootMargin: "400px"});
const resized = new ResizeObserver((entries) => {
  for (const {target} of entries)
    if (drawn.has(target) && !isPrinting && target.clientWidth !== target.layout.width) requestAnimationFrame(() => draw(target));
});

function draw(div) {
  const made = MAKERS[div.dataset.chart](div);
  div.setAttribute("aria-label", made.label);
  if (!window.Plotly || !(drawn.has(div) || near.has(div) || isPrinting)) return;
  const isNew = !drawn.has(div);
  drawn.add(div);
  Plotly.react(div, made.traces, {...made.layout, width: div.clientWidth, height: div.clientHeight},
               {displayModeBar: false, responsive: false, doubleClick: "reset"});
  if (!isNew || div.dataset.chart !== "curves") return;
  div.on("plotly_hover", ({points}) => lookAt(points[0].data.meta));
  div.on("plotly_unhover", () => lookAt(null));
  let isReset = false; // zooming hides the names at the ends of the lines
  div.on("plotly_doubleclick", () => { isReset = true; });
  div.on("plotly_relayout", (change) => {
    if (!("xaxis.range[0]" in change || "yaxis.range[0]" in change)) return;
    if (isReset) draw(div); else Plotly.relayout(div, {annotations: []});
    isReset = false;
  });
}

function redraw(...kinds) {
  for (const div of all(".chart")) if (!kinds.length || kinds.includes(div.dataset.chart)) draw(div);
}

function watchCharts() {
  for (const div of drawn) if (!div.isConnected) { drawn.delete(div); near.delete(div); }
  for (const div of all(".chart")) {
    div.setAttribute("aria-describedby", "keys");
    inView.observe(div);
    resized.observe(div);
  }
}

// -- controls ---------------------------------------------------------------------------------------

function chooseMethod() {
  const select = find("#method");
  if (!select) return;
  const known = [...select.options].map((option) => option.value);
  const mean = (label) => {
    const figures = data.clients.methods[label].filter(isNumber);
    return better(figures.reduce((sum, value) => sum + value, 0) / figures.length);
  };
  if (!known.includes(state.method)) // the best available
    state.method = data.table.map((row) => row.label).find((label) => known.includes(label))
      ?? known.reduce((a, b) => mean(b) > mean(a) ? b : a);
  select.value = state.method;
  const says = find("#gain-says");
  if (says) says.textContent = gainsInWords();
  showWorst();
}

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// clients below the median, and a sentence about them
function servedWorst() {
  const clients = served().sort((a, b) => better(a.value) - better(b.value));
  if (!clients.length) return {worst: [], words: `No client has a score with ${state.method}.`};
  const middle = median(clients.map((client) => client.value)), metric = spoken(data.metric);
  const below = clients.filter((client) => better(middle) - better(client.value) > 1e-9);
  if (!below.length)
    return {worst: [], words: clients.every((client) => client.value === middle)
      ? `All ${times(clients.length, "client")} have the same ${metric}, ${figure(middle)}.`
      : `No client is worse off than the median, ${figure(middle)}: most of the ${times(clients.length, "client")} share it.`};
  const worst = below.slice(0, WORST).map((client) => ({...client, behind: Math.abs(middle - client.value)}));
  const last = worst[worst.length - 1], tied = below.slice(WORST).filter((client) => client.value === last.value).length;
  return {worst, words: `The median client has ${figure(middle)}. ${below.length === 1 ? "One of " : `${count(below.length)} of `}`
    + `${times(clients.length, "client")} ${below.length === 1 ? "is" : "are"} worse off`
    + (below.length > WORST ? `; the worst ${WORST} are listed` : "")
    + (tied ? `, and ${times(tied, "more client")} at ${figure(last.value)} like the last of them.` : ".")};
}

function showWorst() {
  const against = (data.clients.methods || {})[data.reference] && state.method !== data.reference;
  const heads = ["client", state.method, "behind the median", "test rows", "training rows",
                 ...(against ? [data.reference, "gain"] : [])];
  const {worst, words} = servedWorst();
  find("#worst-says").textContent = words;
  find("#worst-box").hidden = !worst.length;
  const head = element("tr", null), body = element("tbody", null);
  head.append(...heads.map((text) => element("th", text, {scope: "col"})));
  for (const client of worst) {
    const row = element("tr", null), cells = [figure(client.value), figure(client.behind), count(client.test), count(client.train),
      ...(against ? [figure(client.alone), signed(client.gain)] : [])];
    row.append(element("th", who(client.name), {scope: "row"}), ...cells.map((text) => element("td", text)));
    body.append(row);
  }
  const top = element("thead", null);
  top.append(head);
  const caption = element("caption", null);
  caption.append(element("span", `Worst test ${spoken(data.metric)} with ${state.method}`));
  find("#worst").replaceChildren(caption, top, body);
}

function applyState() {
  for (const button of all("[data-method]")) button.setAttribute("aria-pressed", String(shown(button.dataset.method)));
  for (const button of all("[data-set]"))
    button.setAttribute("aria-pressed", String(state[button.dataset.set] === button.dataset.value));
  const curves = Object.values(data.curves).map((curve) => curve[state.model]).filter(Boolean);
  const chosen = {...state, grey: isGrey(), logY: isLogY(curves)};
  for (const button of all("[data-toggle]")) button.setAttribute("aria-pressed", String(chosen[button.dataset.toggle]));
  if (find("#all-columns")) find("#all-columns").checked = state.all;
  find("#theme").setAttribute("aria-pressed", String(isDark()));
  chooseMethod();
  sortTable();
  showEdges();
}

const night = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (night.matches ? "dark" : "light")) === "dark";
function remember(theme) {
  try { localStorage.setItem("descant-theme", theme); } catch { /* a browser that keeps nothing */ }
}
function recall() {
  try { return localStorage.getItem("descant-theme"); } catch { return null; }
}

const cellOf = (row, key) => key === "label" ? row.label : (row.cells[key] || {});
function sortedRows() {
  if (!state.sort) return data.table;
  const {key, up} = state.sort, sign = up ? 1 : -1;
  return [...data.table].sort((a, b) => {
    const [left, right] = [cellOf(a, key), cellOf(b, key)];
    if (key === "label") return sign * left.localeCompare(right);
    if (!isNumber(left.mean) || !isNumber(right.mean)) return isNumber(right.mean) - isNumber(left.mean); // unknown last
    return sign * (left.mean - right.mean);
  });
}
function sortTable() {
  const table = find("#results");
  if (!table) return;
  for (const button of all(".sort", table)) {
    const chosen = state.sort && state.sort.key === button.dataset.sort;
    if (chosen) button.parentElement.setAttribute("aria-sort", state.sort.up ? "ascending" : "descending");
    else button.parentElement.removeAttribute("aria-sort");
  }
  const rows = Object.fromEntries(all("tbody tr", table).map((row) => [row.dataset.label, row]));
  find("tbody", table).append(...sortedRows().map((row) => rows[row.label]));
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || !data) return;
  const {method, set, value, toggle, sort, copy, copyTable, pick} = button.dataset;
  if (button.id === "theme") {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    remember(document.documentElement.dataset.theme);
    applyState();
    redraw();
  } else if (method !== undefined) {
    state.front ??= new Set(data.in_front);
    if (shown(method)) state.front.delete(method); else state.front.add(method);
    applyState();
    redraw("curves", "grid");
  } else if (pick) {
    state.front = new Set({all: data.methods.map((each) => each.label), none: [], front: data.in_front}[pick]);
    applyState();
    redraw("curves", "grid");
  } else if (set) {
    state[set] = value;
    applyState();
    redraw(set === "picture" ? "federation" : "curves");
  } else if (toggle) {
    state[toggle] = button.getAttribute("aria-pressed") !== "true";
    applyState();
    redraw("curves");
  } else if (sort) {
    state.sort = {key: sort, up: state.sort && state.sort.key === sort ? !state.sort.up : sort === "label"};
    sortTable();
  } else if (copy) copyText(document.getElementById(copy).textContent);
  else if (copyTable) copyText(copyTable === "latex" ? latex() : markdown());
  else if ("save" in button.dataset) save(find(".chart", button.closest("figure")));
});

document.addEventListener("change", (event) => {
  if (event.target.id === "all-columns") {
    state.all = event.target.checked;
    showEdges();
  }
  if (event.target.id !== "method") return;
  state.method = event.target.value;
  chooseMethod();
  redraw("gains", "scatter");
});

// -- boxes that scroll sideways show it ----------------------------------------------------------------

function showEdges() {
  for (const box of all(".scroll")) {
    const rest = box.scrollWidth - box.clientWidth;
    box.parentElement.toggleAttribute("data-left", box.scrollLeft > 1);
    box.parentElement.toggleAttribute("data-right", rest > 1 && box.scrollLeft < rest - 1);
  }
}
document.addEventListener("scroll", (event) => { if (event.target.classList?.contains("scroll")) showEdges(); }, {capture: true, passive: true});
addEventListener("resize", showEdges);

// -- one method is highlighted: the others fade ----------------------------------------------------

function lookAt(label) {
  for (const div of all(".chart[data-chart=curves], .chart[data-chart=grid]")) {
    if (!drawn.has(div)) continue;
    const layers = all(".scatterlayer > .trace", div);
    div.data.forEach((trace, k) => { if (layers[k]) layers[k].style.opacity = label === null || trace.meta === label ? "" : .12; });
  }
  for (const each of all("#results tbody tr, .forest tbody tr, .legend button"))
    each.toggleAttribute("data-looked-at", (each.dataset.label ?? each.dataset.method) === label);
}
const labelOf = (target) => target.closest?.("#results tbody tr, .forest tbody tr, .legend button");
for (const type of ["pointerover", "focusin"])
  document.addEventListener(type, (event) => {
    const of = labelOf(event.target);
    if (data && of) lookAt(of.dataset.label ?? of.dataset.method);
  });
for (const type of ["pointerout", "focusout"])
  document.addEventListener(type, (event) => { if (data && labelOf(event.target)) lookAt(null); });

function save(div) {
  if (drawn.has(div)) Plotly.downloadImage(div, {format: "svg", filename: div.id, width: div.clientWidth, height: div.clientHeight});
}

// -- the arrow keys in a chart ------------------------------------------------------------------------

const walks = new WeakMap(); // the current point of a chart

document.addEventListener("keydown", (event) => {
  const div = event.target;
  if (!div.classList.contains("chart") || !drawn.has(div)) return;
  const traces = div.data.map((trace, k) => [trace, k]).filter(([trace]) => trace.hoverinfo === "text");
  const step = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-Infinity, 0], End: [Infinity, 0]}[event.key];
  if (event.key === "Escape") Plotly.Fx.unhover(div);
  if (!step || !traces.length) return;
  event.preventDefault();
  const at = walks.get(div), clamp = (value, most) => Math.max(0, Math.min(most, value));
  const isMap = traces[0][0].type === "heatmap", rows = isMap ? traces[0][0].y.length : traces.length;
  const row = clamp(at ? at.row + step[1] * (isMap ? -1 : 1) : isMap ? rows - 1 : 0, rows - 1);
  const [trace, curve] = traces[isMap ? 0 : row];
  const column = clamp(at ? at.column + step[0] : 0, trace.x.length - 1);
  walks.set(div, {row, column});
  const point = isMap ? {xval: trace.x[column], yval: trace.y[row]} : {pointNumber: column};
  Plotly.Fx.hover(div, [{curveNumber: curve, ...point}]);
  const text = isMap ? trace.text[row][column] : trace.hovertext[column];
  const reader = document.createElement("textarea"); // decodes entities and runs nothing
  reader.innerHTML = text.replace(/<br>/g, ", ").replace(/<\/?b>/g, "");
  find("#point").textContent = reader.value;
});

// -- paper ------------------------------------------------------------------------------------------

let closed = [];
function paper(begins) {
  if (begins === isPrinting || !data) return;
  isPrinting = begins;
  if (begins) closed = all("details:not([open])");
  for (const details of closed) details.open = begins;
  document.documentElement.toggleAttribute("data-printing", begins);
  redraw();
}
addEventListener("beforeprint", () => paper(true));
addEventListener("afterprint", () => paper(false));
matchMedia("print").addEventListener("change", (event) => paper(event.matches));

// -- a page that is watched ---------------------------------------------------------------------------

function update(next) {
  for (const [name, html] of Object.entries(next.parts)) {
    if (data.parts[name] === html) continue;
    const part = find(`[data-part="${name}"]`), focused = part.contains(document.activeElement) ? document.activeElement.id : "";
    const open = all("details[open]", part).map((details) => details.id);
    part.innerHTML = html;
    for (const id of open) if (document.getElementById(id)) document.getElementById(id).open = true;
    if (focused && document.getElementById(focused)) document.getElementById(focused).focus({preventScroll: true});
  }
  data = next;
  document.title = data.title;
  watchCharts();
  applyState();
  redraw();
}

let last = "", heard = new Date();
async function poll() {
  try {
    const response = await fetch("data.json", {cache: "no-store"});
    if (!response.ok) throw new Error(response.statusText);
    const text = await response.text();
    heard = new Date();
    find("#link").hidden = true;
    if (text !== last) update(JSON.parse(text));
    last = text;
  } catch {
    find("#link").hidden = false;
    find("#link").textContent = `descant watch does not answer: this page is from ${heard.toLocaleTimeString()}.`;
  }
  setTimeout(poll, 2000);
}

// -- the beginning ----------------------------------------------------------------------------------

async function unpack(id) {
  const text = atob(document.getElementById(id).textContent), packed = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) packed[k] = text.charCodeAt(k);
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function begin() {
  document.body.append(probe);
  const theme = recall();
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  data = JSON.parse(await unpack("data"));
  applyState();
  watchCharts();
  redraw(); // so far only their descriptions
  night.addEventListener("change", () => { applyState(); redraw(); });
  await new Promise((resolve) => setTimeout(resolve)); // the words are painted before the library is unpacked
  const script = document.createElement("script");
  script.textContent = await unpack("plotly");
  document.head.append(script);
  const first = find(".chart"); // even if a long table keeps it out of view
  if (first) near.add(first);
  for (const div of near) draw(div);
  if (data.live) poll();
}

function fail(error) {
  for (const div of all(".chart")) {
    div.setAttribute("aria-label", "A chart that this browser could not draw.");
    div.replaceChildren(element("p", "This browser could not draw the chart; the tables are complete.", {class: "empty"}));
  }
  throw error;
}

addEventListener("DOMContentLoaded", () => begin().catch(fail));
