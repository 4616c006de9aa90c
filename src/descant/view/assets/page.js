"use strict";
(() => {
const find = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const COLOURS = 7;
const SHARES = ["accuracy", "auroc", "sensitivity", "specificity", "calibration_error"]; // as in units.py
const WORST = 10; // clients that are listed
const WIDE = 640; // pixels of a chart that has room for names at the ends of its lines
const LINE = 17; // pixels from name to name
const AXES = {round: "round", bytes: "bytes per client", steps: "gradient steps"};
const CLASSES = 14, CELLS = 4000; // more classes, or more cells, are a heat map in place of bars

let data = null;
let isPrinting = false;
const near = new Set(); // charts in view or almost
const drawn = new Set();
// what is null follows from the data until somebody chooses
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
  : SHARES.some((share) => metric.endsWith(share)) ? value.toFixed(4) : String(Number(value.toPrecision(4)));
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
// larger is better in what this returns, whatever the metric
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
function mixed(name, share) { // towards the ground, as an opaque colour
  const [a, b] = [colour(name), colour("ground")].map((text) => text.match(/[\d.]+/g).map(Number));
  return `rgb(${[0, 1, 2].map((k) => Math.round(a[k] * share + b[k] * (1 - share))).join(", ")})`;
}
const place = (label) => data.methods.findIndex((method) => method.label === label);
const style = (label, otherwise = 0) => data.looks[place(label) < 0 ? otherwise % data.looks.length : place(label)];
// methods in colour; the others are grey, or not there
const shown = (label) => place(label) < 0 || (state.front ?? new Set(data.in_front)).has(label);
const isGrey = () => state.grey ?? data.in_front.length < data.methods.length;

// -- the charts: each is made from the data and the state alone -----------------------------------------

function axis(title, more = {}) {
  return {title: {text: title, standoff: 10, font: {size: 13, color: colour("quiet")}}, gridcolor: colour("grid"),
          linecolor: colour("line"), zerolinecolor: colour("line"), tickfont: {color: colour("quiet"), size: 12},
          automargin: Boolean(more.ticktext), // names are of any length; figures fit, and this takes time
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
  // the methods in colour fill the axis; a grey one that has left it is off the scale
  const fitted = [...bands, ...lines.filter((line) => line.isFront || !ends.length)];
  const seen = fitted.flatMap((trace) => trace.y.filter((_, k) => trace.x[k] >= from)).map((value) => log(isLog, value));
  const [low, high] = seen.length ? [Math.min(...seen), Math.max(...seen)] : [0, 1];
  const y = {...axis(plain(data.y_title[state.model]), {zeroline: false}), type: isLog ? "log" : "linear",
             range: widen(high > low ? [low, high] : [low - .5, high + .5], .05)};
  const named = div.clientWidth >= WIDE || isPrinting ? names(ends, furthest, y.range, div.clientHeight, (value) => log(isLog, value)) : [];
  const better = data.curve_metric === data.metric ? data.lower_is_better : true; // in place of the metric: the loss
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

// names of methods beside the ends of their lines, moved apart until none covers another; a line that ends early
// has its name there
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

// clients of the method that was chosen which have a figure, and a figure of the reference
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
                         // lines of families have names that no method has, and the legend above lacks them
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
  let isReset = false; // names stand where the lines end as long as nobody has zoomed in
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
  if (!known.includes(state.method)) // the best of those that are there
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

// clients that are worse off than the median one, and what there is to say of them
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

// -- boxes that scroll sideways say so ----------------------------------------------------------------

function showEdges() {
  for (const box of all(".scroll")) {
    const rest = box.scrollWidth - box.clientWidth;
    box.parentElement.toggleAttribute("data-left", box.scrollLeft > 1);
    box.parentElement.toggleAttribute("data-right", rest > 1 && box.scrollLeft < rest - 1);
  }
}
document.addEventListener("scroll", (event) => { if (event.target.classList?.contains("scroll")) showEdges(); }, {capture: true, passive: true});
addEventListener("resize", showEdges);

// -- one method is looked at: the others step back ----------------------------------------------------

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

const walks = new WeakMap(); // where one is in a chart

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
  const reader = document.createElement("textarea"); // turns entities back into signs, and runs nothing
  reader.innerHTML = text.replace(/<br>/g, ", ").replace(/<\/?b>/g, "");
  find("#point").textContent = reader.value;
});

// -- copying ----------------------------------------------------------------------------------------

const LATEX = {"\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#",
               "_": "\\_", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "\\textless{}",
               ">": "\\textgreater{}", "|": "\\textbar{}", "±": "$\\pm$", "−": "$-$", "×": "$\\times$", "µ": "$\\mu$"};
const forLatex = (text) => text.replace(/[\\{}&%$#_~^<>|±−×µ]/g, (sign) => LATEX[sign]).replace(/\s+/g, " ");
const forMarkdown = (text) => text.replace(/[\\`*_<>|[\]]/g, "\\$&").replace(/\s+/g, " ");
const isSeen = (k) => state.all || !all("#results thead .sort")[k + 1].parentElement.classList.contains("more");
const columnsSeen = () => data.columns.filter((_, k) => isSeen(k));
const cells = () => [["method", ...columnsSeen().map((column) => column.title)],
  ...sortedRows().map((row) => [row.label, ...columnsSeen().map((column) => cellOf(row, column.key).text ?? "-")])];

function latex() {
  const [head, ...rows] = cells().map((row) => `${row.map(forLatex).join(" & ")} \\\\`);
  return [`\\begin{tabular}{l${"r".repeat(columnsSeen().length)}} % needs \\usepackage{booktabs}`, "\\toprule", head, "\\midrule",
          ...rows, "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

function markdown() {
  const [head, ...rows] = cells().map((row) => `| ${row.map(forMarkdown).join(" | ")} |`);
  return [head, `|:--|${"--:|".repeat(columnsSeen().length)}`, ...rows, ""].join("\n");
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied");
  } catch {
    copyByHand(text);
  }
}

function copyByHand(text) {
  const before = document.activeElement, box = element("textarea", null, {class: "by-hand", "aria-label": "Text to copy"});
  box.value = text;
  document.body.append(box);
  box.select();
  const close = () => { box.remove(); before.focus(); };
  if (document.execCommand("copy")) { close(); say("Copied"); return; }
  say("Press Ctrl+C to copy, Escape to close");
  box.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
}

let silence = 0;
function say(text) {
  find("#status").textContent = text;
  clearTimeout(silence);
  silence = setTimeout(() => { find("#status").textContent = ""; }, 4000);
}

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
  redraw(); // so far, only what they say
  night.addEventListener("change", () => { applyState(); redraw(); });
  await new Promise((resolve) => setTimeout(resolve)); // the words are painted before the library is unpacked
  const script = document.createElement("script");
  script.textContent = await unpack("plotly");
  document.head.append(script);
  const first = find(".chart"); // is wanted soonest, also where the table above it is long
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
})();
