// What the charts show: each is made from the data and the state alone. page.js draws them.

const find = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const COLOURS = 7;
const WORST = 10; // clients that are listed
const WIDE = 640; // pixels from which a chart has room for names at the ends of its lines
const LINE = 17; // pixels between names
const AXES = {round: "round", bytes: "bytes per client", steps: "gradient steps"};
const CLASSES = 14, CELLS = 4000; // more of either are drawn as a heat map, not as bars

let data = null;
let isPrinting = false;
const near = new Set(); // charts in or near the view
const drawn = new Set();
// null: follows from the data until the user chooses
const state = {front: null, grey: null, x: "round", model: "personal", logX: false, logY: null, seeds: false,
               half: false, picture: "classes", method: null, sort: null, all: false};

// -- numbers and names ------------------------------------------------------------------------------

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
// Plotly reads some HTML in every text that it draws
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const short = (text, most = 26) => {
  const signs = [...String(text)];
  return signs.length > most ? signs.slice(0, most - 1).join("") + "…" : String(text);
};
const figure = (value, metric = data.metric) => !isNumber(value) ? "-"
  : data.is_share[metric] ? value.toFixed(4) : String(Number(value.toPrecision(4)));
const spoken = (metric) => metric.replace(/_/g, " ");
const signed = (value) => !isNumber(value) ? "-"
  : (value > 0 ? "+" : value < 0 ? "−" : "") + figure(Math.abs(value));
const count = (value) => isNumber(value) ? value.toLocaleString("en") : "-";
const bytes = (value) => {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${Math.round(value)} B`;
};
const who = (name) => /^\d+$/.test(name) ? `client ${name}` : name;
const times = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};
// the value, signed so that larger is better
const better = (value) => data.lower_is_better ? -value : value;

// -- colours ----------------------------------------------------------------------------------------

const probe = document.createElement("i");
probe.hidden = true;
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
function faded(name, share) {
  const [r, g, b] = colour(name).match(/[\d.]+/g);
  return `rgba(${r}, ${g}, ${b}, ${share})`;
}
function mixed(name, share) { // with the background, as an opaque colour
  const [a, b] = [colour(name), colour("ground")].map((text) => text.match(/[\d.]+/g).map(Number));
  return `rgb(${[0, 1, 2].map((k) => Math.round(a[k] * share + b[k] * (1 - share))).join(", ")})`;
}
const place = (label) => data.methods.findIndex((method) => method.label === label);
const style = (label, otherwise = 0) => data.looks[place(label) < 0 ? otherwise % data.looks.length : place(label)];
// whether a method is in colour; the others are grey or hidden
const shown = (label) => place(label) < 0 || (state.front ?? new Set(data.in_front)).has(label);
const isGrey = () => state.grey ?? data.in_front.length < data.methods.length;

// -- the charts: each is made from the data and the state alone -----------------------------------------

function axis(title, more = {}) {
  return {title: {text: title, standoff: 10, font: {size: 13, color: colour("quiet")}}, gridcolor: colour("grid"),
          linecolor: colour("line"), zerolinecolor: colour("line"), tickfont: {color: colour("quiet"), size: 12},
          automargin: Boolean(more.ticktext), // slow, and only names need it
          fixedrange: matchMedia("(pointer: coarse)").matches, ...more};
}

function layout(x, y, more = {}) {
  const touched = matchMedia("(pointer: coarse)").matches;
  return {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
          font: {family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink")},
          margin: {l: 64, r: 12, t: 10, b: 46}, hovermode: "closest", dragmode: touched ? false : "zoom",
          hoverlabel: {bgcolor: colour("raised"), bordercolor: colour("line"), align: "left", namelength: -1,
                       font: {color: colour("ink"), size: 13}},
          xaxis: x, yaxis: y, ...more};
}

const logged = (axis, isLog, values) => isLog && values.some((value) => value > 0)
  ? {...axis, type: "log", dtick: undefined} : {...axis, type: "linear"};

function makeCurves(div) {
  const metric = spoken(data.curve_metric), which = state.model === "personal" ? "personal models" : "global model";
  const on = data.methods.map((method) => method.label).filter((label) => data.curves[label] && (shown(label) || isGrey()));
  const model = (label) => data.curves[label][state.model];
  const labels = on.filter((label) => model(label)).sort((a, b) => shown(a) - shown(b)); // grey lines lie below
  const without = on.filter((label) => !model(label));
  const furthest = Math.max(1, ...labels.map((label) => Math.max(0, ...data.curves[label][state.x])));
  const nearest = Math.min(furthest, ...labels.flatMap((label) => data.curves[label][state.x].filter((x) => x > 0)));
  const isLog = isLogY(labels.map(model));
  const bands = [], lines = [], seeds = [], told = [], ends = [];
  for (const label of labels) {
    const curve = data.curves[label], figures = model(label), look = style(label), isFront = shown(label);
    let at = curve[state.x].map((x, k) => k).filter((k) => isNumber(figures.mean[k])
      && isNumber(curve[state.x][k]) && (!isLog || figures.mean[k] > 0));
    if (!at.length) continue;
    const last = at[at.length - 1];
    if (isFront) {
      told.push([label, figures.mean[last]]);
      ends.push({label, x: curve[state.x][last], y: figures.mean[last]});
    }
    const silent = state.x === "bytes" && !curve.bytes.some((sent) => sent > 0);
    if (!silent && state.logX) at = at.filter((k) => curve[state.x][k] > 0);
    const x = silent ? [state.logX ? nearest : 0, furthest] : at.map((k) => curve[state.x][k]);
    if (silent) at = [last, last];
    const band = !isFront ? [] : at.map((k, i) => [x[i], figures.low[k], figures.high[k]])
      .filter(([, low, high]) => isNumber(low) && isNumber(high) && (!isLog || low > 0));
    if (band.some(([, low, high]) => high > low))
      bands.push({type: "scatter", meta: label, hoverinfo: "skip", mode: "lines", line: {width: 0},
                  x: [...band.map((b) => b[0]), ...band.map((b) => b[0]).reverse()],
                  y: [...band.map((b) => b[2]), ...band.map((b) => b[1]).reverse()],
                  fill: "toself", fillcolor: faded(look.colour, .12)});
    const shade = isFront ? colour(look.colour) : colour("others");
    lines.push({type: "scatter", meta: label, name: plain(label), mode: isFront ? "lines+markers" : "lines", x,
                y: at.map((k) => figures.mean[k]), line: {color: shade, dash: look.dash, width: isFront ? 2.25 : 1.25},
                marker: {color: shade, symbol: look.symbol, size: 8, maxdisplayed: 7}, isFront,
                hoverinfo: "text", hovertext: at.map((k) => tip(label, curve, figures, k))});
    if (state.seeds && !silent && isFront) seeds.push(...eachSeed(label, curve, figures, at, x, look));
  }
  const unit = state.x === "bytes" ? {ticksuffix: "B", tickformat: "~s"} : {tickformat: state.x === "steps" ? "~s" : ",d"};
  const log = (isLogged, value) => isLogged ? Math.log10(value) : value;
  const widen = ([low, high], share) => [low - (high - low) * share, high + (high - low) * share];
  const from = state.half ? furthest / 2 : state.logX ? nearest : 0;
  const x = {...axis(AXES[state.x], {...unit, zeroline: false}), type: state.logX ? "log" : "linear",
             range: widen([log(state.logX, from), log(state.logX, furthest)], .012)};
  // the axis fits the methods in colour; grey lines may leave it
  const fitted = [...bands, ...lines.filter((line) => line.isFront || !ends.length)];
  const seen = fitted.flatMap((trace) => trace.y.filter((_, k) => trace.x[k] >= from)).map((value) => log(isLog, value));
  const [low, high] = seen.length ? [Math.min(...seen), Math.max(...seen)] : [0, 1];
  const y = {...axis(plain(data.y_title[state.model]), {zeroline: false}), type: isLog ? "log" : "linear",
             range: widen(high > low ? [low, high] : [low - .5, high + .5], .05)};
  const named = div.clientWidth >= WIDE || isPrinting ? names(ends, furthest, y.range, div.clientHeight, (value) => log(isLog, value)) : [];
  const better = data.curve_metric === data.metric ? data.lower_is_better : true; // the loss replaces the metric
  const order = told.sort((a, b) => better ? a[1] - b[1] : b[1] - a[1])
    .map(([label, value]) => `${label} ${figure(value, data.curve_metric)}`);
  const label = `Lines: test ${metric} of the ${which} against ${AXES[state.x]}${isLog ? ", on a log axis" : ""}. `
    + (order.length ? `At the end, best first: ${order.join(", ")}.` : "No method is in colour.")
    + (without.length ? ` Without a ${state.model} model: ${without.join(", ")}.` : "");
  const made = layout(x, y, {annotations: named,
                             uirevision: ["x", "model", "logX", "half"].map((key) => state[key]).join(" ") + isLog});
  if (named.length) made.margin = {...made.margin, r: 150};
  return {traces: [...bands, ...seeds, ...lines], label, layout: made};
}

function isLogY(curves) {
  return curves.some((curve) => curve.mean.some((value) => value > 0)) && (state.logY ?? data.log_y[state.model]);
}

// names of methods at the ends of their lines, moved apart so that they do not overlap
function names(ends, furthest, [low, high], height, scaled) {
  const room = height - 56, least = LINE / room; // without the margins
  const text = (label) => ({text: `<span style="color:${colour(style(label).colour)}">${style(label).sign}</span> `
    + plain(short(label, 18)), xanchor: "left", yanchor: "middle", showarrow: false, font: {size: 12, color: colour("ink")}});
  const isEarly = ({x}) => state.x !== "bytes" && x < furthest * .9;
  const early = ends.filter(isEarly).map(({label, x, y}) => ({
    ...text(label), x: state.logX ? Math.log10(x) : x, y: scaled(y), xshift: 8, bgcolor: faded("ground", .75)}));
  const at = ends.filter((end) => !isEarly(end))
    .map((end) => ({...end, at: Math.min(1, Math.max(0, (scaled(end.y) - low) / (high - low)))})).sort((a, b) => b.at - a.at);
  if (at.length * LINE > room) return [];
  for (let k = 1; k < at.length; k++) at[k].at = Math.min(at[k].at, at[k - 1].at - least);
  for (let k = at.length - 1, floor = 0; k >= 0; k--, floor += least) at[k].at = Math.max(at[k].at, floor);
  return [...early, ...at.map(({label, at: y}) => ({...text(label), xref: "paper", yref: "paper", x: 1, y, xshift: 6}))];
}

function tip(label, curve, figures, k) {
  const range = isNumber(figures.low[k]) && figures.high[k] > figures.low[k]
    ? ` (${figure(figures.low[k], data.curve_metric)} to ${figure(figures.high[k], data.curve_metric)})` : "";
  return `<b>${plain(short(label, 40))}</b><br>${plain(spoken(data.curve_metric))} ${figure(figures.mean[k], data.curve_metric)}${range}<br>`
    + `round ${count(curve.round[k])}, ${bytes(curve.bytes[k])}, ${count(curve.steps[k])} steps`;
}

function eachSeed(label, curve, figures, at, x, look) {
  const rounds = curve.best_round || [];
  return Object.entries(figures.seeds || {}).flatMap(([seed, values], s) => {
    const line = {type: "scatter", meta: label, mode: "lines", hoverinfo: "skip", x, y: at.map((k) => values[k]),
                  line: {color: faded(look.colour, .45), width: 1, dash: look.dash}};
    const best = at.indexOf(curve.round.indexOf(rounds[s]));
    if (best < 0 || !isNumber(values[at[best]])) return [line];
    return [line, {type: "scatter", meta: label, mode: "markers", x: [x[best]], y: [values[at[best]]],
                   marker: {symbol: "circle-open", size: 9, color: colour(look.colour), line: {width: 1.5}},
                   hoverinfo: "text", hovertext: [`<b>${plain(short(label, 40))}</b><br>seed ${plain(seed)}, best `
                     + `validation in round ${count(rounds[s])}<br>${plain(spoken(data.curve_metric))} ${figure(values[at[best]], data.curve_metric)}`]}];
  });
}

// the clients with a score under the chosen method; gain: against the reference
function served() {
  const {names, n_train, n_test, methods} = data.clients, own = (methods || {})[state.method] || [];
  const alone = (methods || {})[data.reference] || [];
  return own.map((value, k) => ({name: names[k], train: n_train[k], test: n_test[k], value, alone: alone[k],
                                 gain: isNumber(alone[k]) ? better(value - alone[k]) : null}))
    .filter((client) => isNumber(client.value));
}
const compared = () => served().filter((client) => client.gain !== null);
const clientTip = (client) => `<b>${plain(short(who(client.name), 40))}</b><br>${plain(short(data.reference, 30))} `
  + `${figure(client.alone)}, ${plain(short(state.method, 30))} ${figure(client.value)}<br>gain ${signed(client.gain)}`
  + `<br>${times(client.train, "training row")}, ${times(client.test, "test row")}`;

function gainsInWords() {
  const clients = compared();
  if (!clients.length) return "No method with scores of clients is shown.";
  const gains = clients.map((client) => client.gain), up = gains.filter((gain) => gain > 0).length;
  const worst = clients.reduce((a, b) => b.gain < a.gain ? b : a), best = clients.reduce((a, b) => b.gain > a.gain ? b : a);
  const down = gains.filter((gain) => gain < 0).length;
  return `Of ${times(clients.length, "client")}, ${up} ${up === 1 ? "does" : "do"} better with ${state.method} than with `
    + `${data.reference}, and ${down} ${down === 1 ? "does" : "do"} worse. The median gain is ${signed(median(gains))}, the `
    + `largest ${signed(best.gain)} (${who(best.name)}), the smallest ${signed(worst.gain)} (${who(worst.name)}).`;
}

function makeGains() {
  const clients = compared().sort((a, b) => b.gain - a.gain);
  const few = clients.length <= 20;
  const x = axis(few ? "" : `${count(clients.length)} clients, sorted`, {
    showgrid: false, zeroline: false, tickvals: few ? clients.map((_, k) => k) : [],
    ticktext: few ? clients.map((client) => plain(short(client.name, 14))) : undefined});
  const y = axis(`gain in ${plain(spoken(data.metric))}`, {zeroline: true, zerolinecolor: colour("quiet")});
  const bars = {type: "bar", meta: state.method, x: clients.map((_, k) => k), y: clients.map((client) => client.gain),
                marker: {color: clients.map((client) => colour(client.gain >= 0 ? "up" : "down"))},
                hoverinfo: "text", hovertext: clients.map(clientTip)};
  return {traces: clients.length ? [bars] : [], label: `Bars, one for each client. ${gainsInWords()}`,
          layout: layout(x, y, {bargap: clients.length > 60 ? 0 : .15})};
}

function makeScatter() {
  const clients = compared(), values = clients.flatMap((client) => [client.alone, client.value]);
  const low = Math.min(...values), high = Math.max(...values), room = (high - low) * .05 || .05;
  const range = values.length ? [low - room, high + room] : [0, 1];
  const points = {type: "scatter", mode: "markers", meta: state.method, x: clients.map((client) => client.alone),
                  y: clients.map((client) => client.value), hoverinfo: "text", hovertext: clients.map(clientTip),
                  marker: {size: 8, opacity: .75, color: clients.map((client) => colour(client.gain >= 0 ? "up" : "down")),
                           symbol: clients.map((client) => client.gain >= 0 ? "circle" : "diamond")}};
  const diagonal = {type: "line", x0: range[0], y0: range[0], x1: range[1], y1: range[1], layer: "below",
                    line: {color: colour("quiet"), width: 1, dash: "dot"}};
  return {traces: clients.length ? [points] : [],
          label: `Points, one for each client: ${data.metric} with ${data.reference} to the right, with ${state.method} `
            + `upwards. ${gainsInWords()}`,
          layout: layout(axis(`with ${plain(short(data.reference))}`, {range, zeroline: false}),
                         axis(`with ${plain(short(state.method || "the method"))}`, {range, zeroline: false}),
                         {shapes: [diagonal]})};
}

function makeGrid(div) {
  const grids = data.grids.filter((grid) => grid.field === div.dataset.key);
  const values = grids.flatMap((grid) => grid.values), isNumeric = values.every(isNumber);
  const known = [...new Set(values.map(String))];
  const ratio = Math.max(...values) / Math.min(...values);
  const isLog = isNumeric && values.every((value) => value > 0) && ratio >= 10;
  const traces = grids.filter((grid) => shown(grid.label)).map((grid, k) => {
    const look = style(grid.label, k);
    return {type: "scatter", mode: "lines+markers", meta: grid.label, name: plain(short(grid.label)),
            x: grid.values.map((value) => isNumeric ? value : known.indexOf(String(value))), y: grid.mean,
            line: {color: colour(look.colour), dash: look.dash, width: 2.25}, marker: {symbol: look.symbol, size: 8},
            error_y: {type: "data", symmetric: false, thickness: 1.5, width: 3, color: faded(look.colour, .6),
                      array: grid.mean.map((mean, i) => isNumber(grid.high[i]) ? grid.high[i] - mean : 0),
                      arrayminus: grid.mean.map((mean, i) => isNumber(grid.low[i]) ? mean - grid.low[i] : 0)},
            hoverinfo: "text", hovertext: grid.values.map((value, i) => `<b>${plain(short(grid.label, 40))}</b><br>`
              + `${plain(grid.field)} = ${plain(value)}<br>${plain(data.metric)} ${figure(grid.mean[i])}`
              + (isNumber(grid.low[i]) ? ` (${figure(grid.low[i])} to ${figure(grid.high[i])})` : ""))};
  });
  const ticks = isNumeric ? {type: isLog ? "log" : "linear", tickvals: known.length <= 12 ? known.map(Number) : undefined,
                             ticktext: known.length <= 12 ? known : undefined}
    : {tickvals: known.map((_, k) => k), ticktext: known.map((value) => plain(short(value, 16)))};
  const best = grids.filter((grid) => shown(grid.label)).map((grid) => {
    const at = grid.mean.reduce((a, mean, k) => isNumber(mean) && (a < 0 || better(mean) > better(grid.mean[a])) ? k : a, -1);
    return at < 0 ? `${grid.label}: nothing yet` : `${grid.label}: best ${figure(grid.mean[at])} at ${grid.values[at]}`;
  });
  return {traces, label: `Lines: test ${data.metric} against ${div.dataset.key}${isLog ? ", on a log axis" : ""}. ${best.join("; ")}.`,
          layout: layout(axis(plain(div.dataset.key), {...ticks, zeroline: false}),
                         axis(`test ${plain(spoken(data.metric))}`, {zeroline: false}),
                         // the legend above lacks families of methods
                         {showlegend: grids.some((grid) => place(grid.label) < 0),
                          legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false,
                                   font: {color: colour("quiet"), size: 12}}})};
}

function makeClusters(div) {
  const found = data.clusters[div.dataset.key], names = data.clients.names.length ? data.clients.names : data.federation.names;
  const last = found.of_client[found.of_client.length - 1] || [];
  const order = last.map((_, k) => k).sort((a, b) => (last[b] ?? -1) - (last[a] ?? -1) || b - a);
  const ids = [...new Set(found.of_client.flat().filter(isNumber))].sort((a, b) => a - b);
  const share = (k) => k / ids.length, pick = (k) => k < COLOURS ? colour(`c${k}`) : mixed(`c${k % COLOURS}`, .55);
  const name = (client) => names[client] === undefined ? `client ${client}` : who(names[client]);
  const trace = {
    type: "heatmap", meta: div.dataset.key, x: found.rounds, y: order.map((_, k) => k),
    z: order.map((client) => found.of_client.map((round) => isNumber(round[client]) ? ids.indexOf(round[client]) : null)),
    zmin: -.5, zmax: ids.length - .5, ygap: order.length <= 60 ? 1 : 0, hoverongaps: false,
    colorscale: ids.flatMap((_, k) => [[share(k), pick(k)], [share(k + 1), pick(k)]]), hoverinfo: "text",
    text: order.map((client) => found.of_client.map((round, k) => `<b>${plain(short(name(client), 40))}</b><br>round `
      + `${count(found.rounds[k])}: cluster ${plain(round[client] ?? "-")}`)),
    colorbar: {thickness: 10, outlinewidth: 0, title: {text: "cluster", font: {color: colour("quiet"), size: 12}},
               tickvals: ids.map((_, k) => k), ticktext: ids.map(String), tickfont: {color: colour("quiet"), size: 12}}};
  const few = order.length <= 30;
  const y = axis(few ? "" : "clients", {showgrid: false, zeroline: false, tickvals: few ? order.map((_, k) => k) : [],
                                        ticktext: few ? order.map((client) => plain(short(name(client), 14))) : []});
  const size = ids.map((id) => `${last.filter((own) => own === id).length} in cluster ${id}`);
  return {traces: ids.length ? [trace] : [], label: `A heat map of the clusters of ${div.dataset.key}: clients over rounds. `
            + `At the end: ${size.join(", ") || "nothing yet"}.`,
          layout: layout(axis("round", {showgrid: false, zeroline: false}), y)};
}

function makeFederation() {
  const {names, sizes, classes, class_names: called} = data.federation;
  const byClass = classes && state.picture === "classes";
  const total = names.map((_, k) => ["train", "validation", "test"].reduce((sum, part) => sum + ((sizes[part] || [])[k] || 0), 0));
  const main = (k) => classes[k].indexOf(Math.max(...classes[k]));
  const order = names.map((_, k) => k).sort((a, b) => (byClass ? main(a) - main(b) : 0) || total[b] - total[a]);
  const kinds = classes ? (called || (classes[0] || []).map((_, k) => String(k))) : [];
  const few = names.length <= 30, at = order.map((_, k) => k);
  const x = axis(few ? "" : `${count(names.length)} clients`, {showgrid: false, zeroline: false, tickvals: few ? at : [],
                 ticktext: few ? order.map((k) => plain(short(names[k], 14))) : []});
  const label = (byClass ? `Rows of ${kinds.length} classes at ${times(names.length, "client")}. ` : `Rows of ${times(names.length, "client")}. `)
    + (total.length ? `The largest has ${count(Math.max(...total))} rows, the median ${count(median(total))}, `
      + `the smallest ${count(Math.min(...total))}.` : "");
  if (byClass && (kinds.length > CLASSES || kinds.length * names.length > CELLS)) {
    const trace = {type: "heatmap", x: at, y: kinds.map((_, k) => k), z: kinds.map((_, c) => order.map((k) => classes[k][c] || null)),
                   colorscale: [[0, mixed("c0", .15)], [1, colour("c0")]], hoverongaps: false, hoverinfo: "text",
                   text: kinds.map((kind, c) => order.map((k) => `<b>${plain(short(who(names[k]), 40))}</b><br>class `
                     + `${plain(short(kind, 30))}: ${times(classes[k][c], "row")}`)),
                   colorbar: {thickness: 10, outlinewidth: 0, title: {text: "rows"}, tickfont: {color: colour("quiet"), size: 12}}};
    const few = kinds.length <= 30;
    return {traces: [trace], label: `A heat map. ${label}`,
            layout: layout(x, axis("class", {showgrid: false, zeroline: false, tickvals: few ? kinds.map((_, k) => k) : undefined,
                                             ticktext: few ? kinds.map((kind) => plain(short(kind, 14))) : undefined}))};
  }
  const stack = byClass ? kinds.map((kind, c) => [`class ${kind}`, (k) => classes[k][c], c < COLOURS ? colour(`c${c}`) : mixed(`c${c % COLOURS}`, .5)])
    : [["train", "c0"], ["validation", "c5"], ["test", "c4"]].filter(([part]) => (sizes[part] || []).some((rows) => rows > 0))
      .map(([part, name]) => [part, (k) => sizes[part][k], colour(name)]);
  const traces = stack.map(([kind, rows, shade]) => ({
    type: "bar", name: plain(short(kind.replace(/^class /, ""), 20)), x: at, y: order.map(rows), marker: {color: shade, line: {width: 0}},
    hoverinfo: "text", hovertext: order.map((k) => `<b>${plain(short(who(names[k]), 40))}</b><br>${plain(short(kind, 30))}: `
      + `${times(rows(k), "row")} of ${count(total[k])}`)}));
  return {traces, label: `Stacked bars. ${label}`,
          layout: layout(x, axis("rows", {zeroline: false}), {
            barmode: "stack", bargap: names.length > 60 ? 0 : .12, showlegend: true,
            legend: {title: {text: byClass ? "class " : "", side: "left"}, orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", itemclick: false,
                     itemdoubleclick: false, font: {color: colour("quiet"), size: 12}}})};
}

const MAKERS = {curves: makeCurves, gains: makeGains, scatter: makeScatter,
                grid: makeGrid, clusters: makeClusters, federation: makeFederation};
