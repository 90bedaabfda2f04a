"use strict";
// A header of a table becomes a button that sorts its rows: first the largest number, then the smallest, texts from A.
const SIZES = { k: 1e3, M: 1e6, G: 1e9, T: 1e12 };
function value(row, column) {
  const text = row.cells[column] ? row.cells[column].textContent.trim() : "";
  const found = text.replace(/,/g, "").replace(/^[−–]/, "-").match(/^([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*([kMGT])?/);
  return found ? { number: Number(found[1]) * (SIZES[found[2]] || 1) } : { text: text };
}
function compare(a, b, sign) {
  if (a.number !== undefined && b.number !== undefined) return sign * (a.number - b.number);
  if (a.number !== undefined || b.number !== undefined) return a.number !== undefined ? -1 : 1;
  return sign * a.text.localeCompare(b.text, "en", { numeric: true });
}
function sort(table, header, column) {
  const body = table.tBodies[0], rows = Array.from(body.rows);
  const numbers = rows.some((row) => value(row, column).number !== undefined);
  const before = header.getAttribute("aria-sort");
  const up = before ? before === "descending" : !numbers;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  rows.sort((a, b) => compare(value(a, column), value(b, column), up ? 1 : -1));
  body.append(...rows);
}
for (const table of document.querySelectorAll("table.sorts")) {
  if (table.tBodies[0].rows.length < 2) continue;
  Array.from(table.tHead.rows[0].cells).forEach((header, column) => {
    if (!header.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => sort(table, header, column));
  });
}
