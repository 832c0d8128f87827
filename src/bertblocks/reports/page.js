// Draws the charts of the page, and makes its tables searchable. Everything that it shows is part of the page.
const config = JSON.parse(document.getElementById("chart-config").textContent);

function patched(original, width, isLog, smoothing) {
  const spec = structuredClone(original);
  for (const layer of spec.layer ?? []) {
    const y = layer.encoding?.y;
    if (y?.scale && isLog) y.scale = { domain: y.scale.domain, type: "log", nice: false };
    const legend = layer.encoding?.color?.legend;
    if (legend) Object.assign(legend, { columns: width < 560 ? 1 : 3, labelLimit: Math.max(120, width - 60) });
  }
  if (smoothing > 0) {
    for (const step of spec.transform ?? []) if (step.frame) step.frame = [-smoothing, smoothing];
    const [line] = spec.layer;
    const raw = structuredClone(line);
    delete raw.params;
    raw.transform = [{ filter: "datum.dense" }];
    raw.encoding.y = { ...raw.encoding.y, field: "y" };
    raw.encoding.opacity = { value: 0.2 };
    spec.layer.push(raw);
  }
  if (width < 560 && spec.width === "container") {
    spec.config = { axis: { labelLimit: 160 } };
  }
  return spec;
}

async function draw(figure) {
  const view = figure.querySelector(".view");
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const controls = figure.querySelector(".controls");
  const log = controls?.querySelector("[name=log]");
  const smooth = controls?.querySelector("[name=smooth]");
  const options = { actions: false, renderer: "svg", config };
  let drawn;
  const redraw = async () => {
    drawn?.finalize();
    const changed = patched(spec, figure.clientWidth, log?.checked, Number(smooth?.value ?? 0));
    drawn = await vegaEmbed(view, changed, options);
  };
  for (const control of [log, smooth]) control?.addEventListener("input", redraw);
  await redraw();
}

function makeSearchable(block) {
  const table = block.querySelector("table");
  const body = table.tBodies[0];
  const search = block.querySelector("input[type=search]");
  const filters = [...block.querySelectorAll("select")];
  const text = (row, index) => row.cells[index].dataset.value ?? row.cells[index].textContent;
  for (const filter of filters) {
    const seen = [...new Set([...body.rows].map((row) => text(row, filter.dataset.column)))].sort();
    for (const value of seen) filter.add(new Option(value, value));
  }
  const apply = () => {
    const wanted = search.value.trim().toLowerCase();
    for (const row of body.rows) {
      const matches = filters.every((filter) => !filter.value || text(row, filter.dataset.column) === filter.value);
      row.hidden = !(matches && row.textContent.toLowerCase().includes(wanted));
    }
  };
  for (const control of [search, ...filters]) control.addEventListener("input", apply);
}

function makeSortable(table) {
  [...table.tHead.rows[0].cells].forEach((head, index) => {
    let direction = 1;
    head.querySelector("button")?.addEventListener("click", () => {
      const key = (row) => row.cells[index].dataset.value ?? row.cells[index].textContent;
      const rows = [...table.tBodies[0].rows];
      const isNumber = rows.every((row) => key(row) === "" || !isNaN(Number(key(row))));
      rows.sort((a, b) => direction * (isNumber ? Number(key(a)) - Number(key(b)) : key(a).localeCompare(key(b))));
      direction = -direction;
      table.tBodies[0].append(...rows);
    });
  });
}

for (const passage of document.querySelectorAll(".passage")) {
  const mark = passage.querySelector("mark");
  if (mark) passage.scrollTop = mark.offsetTop - passage.offsetTop - 40;
}
document.querySelectorAll(".searchable").forEach(makeSearchable);
document.querySelectorAll("table.sortable").forEach(makeSortable);
// a chart in a closed section has no width yet
const later = new WeakSet(document.querySelectorAll("details[open]"));
document.querySelectorAll("details").forEach((details) =>
  details.addEventListener("toggle", () => {
    if (!details.open || later.has(details)) return;
    later.add(details);
    details.querySelectorAll("figure").forEach(draw);
  }),
);
const visible = [...document.querySelectorAll("figure")].filter((figure) => !figure.closest("details:not([open])"));
await Promise.all(visible.map(draw));
document.documentElement.dataset.drawn = "true";
