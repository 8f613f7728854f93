// The theme gives no names to the arrows that unfold the list of pages, nor to the list itself.
document.addEventListener("DOMContentLoaded", () => {
  for (const arrow of document.querySelectorAll("summary:has(.toctree-toggle)"))
    arrow.ariaLabel = `Pages of ${arrow.closest("li").querySelector("a").textContent.trim()}`
  const list = document.querySelector(".bd-sidebar-primary")
  if (list) list.role = "region", list.ariaLabel = "Pages"
})
