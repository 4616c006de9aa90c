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
