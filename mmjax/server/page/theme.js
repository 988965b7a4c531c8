// Runs before the first paint, so that a chosen theme does not flash.
try {
  const theme = localStorage.getItem("mmjax.theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // A browser without storage follows the system.
}
