// Tables sort by the column whose heading is pressed; numbers by their value, empty cells last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const number = (text) => {
    const found = text.replace(/[,+]/g, "").match(/-?\d+(\.\d+)?/);
    return found ? parseFloat(found[0]) : NaN;
  };
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const next = { none: "descending", descending: "ascending", ascending: "none" };
      const order = next[heading.getAttribute("aria-sort") || "none"];
      for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const text = (row) => row.cells[column].textContent.trim();
      const numeric = !heading.classList.contains("text");
      const compare = (a, b) => {
        if (!text(a) || !text(b)) return text(a) ? -1 : text(b) ? 1 : 0;
        return sign * (numeric ? number(text(a)) - number(text(b)) : text(a).localeCompare(text(b)));
      };
      body.append(...(order === "none" ? original : [...original].sort(compare)));
    });
  });
}
