"use strict";
// Sorts a table by the column whose heading's button was pressed; cells carry their value in data-v.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement, row = heading.parentElement, body = heading.closest("table").tBodies[0];
    const index = Array.prototype.indexOf.call(row.cells, heading);
    const up = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of row.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (line) => line.cells[index].dataset.v ?? line.cells[index].textContent;
    const rank = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === ""); // what is missing stays last
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return up ? order : -order;
    };
    body.append(...Array.from(body.rows).sort(rank));
  });
}
