"use strict";
// Names of runs and sets reach Plotly escaped: it reads a little markup.

const id = (name) => document.getElementById(name);
const all = (query) => [...document.querySelectorAll(query)];
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse)");
const axes = { step: "step", samples: "samples", hours: "hours of work" };
const strokes = { solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "12 4" };
const off = new Set(); // numbers of runs that are not shown
const data = JSON.parse(id("data").textContent);
const curves = data.charts.flatMap((chart) => chart.runs.flatMap((run) => [run.points, run.means]));
if (Math.max(...curves.map((curve) => curve.hours.at(-1) || 0)) < 2) {
  axes.hours = "minutes of work";
  curves.forEach((curve) => (curve.hours = curve.hours.map((hours) => 60 * hours)));
}

const look = (run) => ({ color: data.colours[run % data.colours.length][dark.matches ? 1 : 0], dash: data.dashes[run % data.dashes.length] });
const shown = () => data.names.map((_, run) => run).filter((run) => !off.has(run));
const style = (name) => getComputedStyle(name).color;

// Means over a window of neighbours, `share` of the curve to both sides together.
function smoothed(values, share) {
  const half = Math.floor((values.length * share) / 2);
  return values.map((_, i) => {
    const part = values.slice(Math.max(0, i - half), i + half + 1);
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  });
}

function lines(chart) {
  const axis = id("axis").value;
  const share = Number(id("smooth").value) / 100;
  const traces = [];
  const many = shown().length > 7;
  for (const run of shown()) {
    const { points, means } = chart.runs[run];
    const few = points.y.length <= 30;
    const smooth = share > 0 && means.y.length * share >= 2;
    const line = { ...look(run), width: 2 };
    const raw = { x: points[axis], y: points.y, name: escaped(data.names[run]), line, mode: few ? "lines+markers" : "lines" };
    traces.push(smooth ? { ...raw, line: { color: line.color, width: 1 }, opacity: many ? 0.12 : 0.3, hoverinfo: "skip" } : raw);
    if (smooth) traces.push({ ...raw, x: means[axis], y: smoothed(means.y, share) });
  }
  for (const trace of traces) Object.assign(trace, { type: "scatter", hovertemplate: trace.hoverinfo ? undefined : many ? `%{y:.5~g} at %{x}<br>${trace.name}<extra></extra>` : `%{y:.5~g}<extra>${trace.name}</extra>` });
  return [traces, { hovermode: many ? "closest" : "x unified", title: axes[axis] }];
}

function draw(figure) {
  const chart = data.charts[figure.dataset.chart];
  const [traces, { hovermode, title }] = lines(chart);
  const log = figure.querySelector(".log").getAttribute("aria-pressed") === "true";
  const ink = style(document.body);
  const line = getComputedStyle(document.querySelector("header")).borderBottomColor;
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
  const soft = style(document.querySelector("h1 span"));
  const largest = Math.max(...traces.flatMap((trace) => trace.y.filter((y) => y !== null && y !== undefined)), 0);
  const layout = {
    hovermode, showlegend: false, dragmode: touch.matches ? false : "zoom",
    uirevision: `${id("axis").value} ${log}`, height: figure.querySelector(".plot").clientHeight, margin: { l: 8, r: 10, t: 8, b: 8 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
    font: { color: ink, size: 12, family: getComputedStyle(document.body).fontFamily },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: getComputedStyle(figure).backgroundColor, font: { color: ink }, namelength: -1 },
    xaxis: { ...axis, title: { text: title, standoff: 4 }, exponentformat: "B", nticks: 6, tickangle: 0 },
    yaxis: { ...axis, type: log ? "log" : "linear", rangemode: chart.zero ? "tozero" : "normal", exponentformat: largest < 0.01 ? "power" : "B", nticks: 6 },
  };
  const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]], displayModeBar: touch.matches ? false : "hover", toImageButtonOptions: { filename: chart.title } };
  return Plotly.react(figure.querySelector(".plot"), traces, layout, config);
}

const figures = () => all(".charts figure").filter((figure) => figure.offsetParent);
const drawAll = () => Promise.all(figures().map(draw));

function chips() {
  id("runs").replaceChildren(...(data.names.length > 1 ? data.names : []).map((name, run) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    const { color, dash } = look(run);
    button.type = "button";
    button.setAttribute("aria-pressed", String(!off.has(run)));
    button.innerHTML = `<svg width="30" height="8" aria-hidden="true"><path d="M0 4h30" stroke="${color}" stroke-width="3" stroke-dasharray="${strokes[dash]}"/></svg>`;
    button.append(name);
    button.onclick = () => { off[off.has(run) ? "delete" : "add"](run); button.setAttribute("aria-pressed", String(!off.has(run))); drawAll(); };
    item.append(button);
    return item;
  }));
}

// A part of the axis, moved or made smaller by a key; false: the key does nothing.
function zoom(plot, key) {
  const [from, to] = plot.layout.xaxis.range || plot._fullLayout.xaxis.range;
  const width = to - from;
  const moves = { ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "-": [-0.35, 0.35] };
  if (key === "0") Plotly.relayout(plot, { "xaxis.autorange": true, "yaxis.autorange": true });
  else if (moves[key]) Plotly.relayout(plot, { "xaxis.range": [from + moves[key][0] * width, to + moves[key][1] * width] });
  else return false;
  return true;
}

// A table that is wider than its place says so.
const measureTables = () => all(".scroll").forEach((one) => one.classList.toggle("wide", one.scrollWidth > one.clientWidth + 1));

document.addEventListener("DOMContentLoaded", () => {
  id("tools").onsubmit = (event) => event.preventDefault();
  id("axis").onchange = drawAll;
  id("smooth").oninput = () => { id("width").textContent = `${id("smooth").value} %`; drawAll(); };
  id("reset").onclick = () => figures().forEach((figure) => Plotly.relayout(figure.querySelector(".plot"), { "xaxis.autorange": true, "yaxis.autorange": true }));
  if (id("all")) id("all").onclick = () => { if (off.size) off.clear(); else data.names.forEach((_, run) => off.add(run)); chips(); drawAll(); };
  all(".log").forEach((button) => (button.onclick = () => { button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true")); draw(button.closest("figure")); }));
  all(".plot").forEach((plot) => (plot.onkeydown = (event) => { if (zoom(plot, event.key)) event.preventDefault(); }));
  all(".zoom").forEach((button) => (button.onclick = () => zoom(button.closest("figure").querySelector(".plot"), button.dataset.key)));
  all("details").forEach((one) => (one.ontoggle = () => { measureTables(); if (one.id === "more") drawAll(); }));
  window.onresize = measureTables;
  id("more").open = innerWidth > 700;
  measureTables();
  dark.onchange = () => { chips(); drawAll(); };
  chips();
  drawAll().then(() => document.body.classList.add("drawn"));
});
