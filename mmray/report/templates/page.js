// Unpacks Plotly and draws each figure of the page in the reader's colors.
(async () => {
  const packed = document.getElementById("plotly").textContent;
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = () => ({ gridcolor: color("--grid"), linecolor: color("--line"), tickcolor: color("--line"), zerolinecolor: color("--line") });
  const themed = (layout) => {
    const out = { ...layout, font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: color("--soft") } };
    out.hoverlabel = { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } };
    for (const name of ["xaxis", "yaxis"]) {
      out[name] = { ...layout[name], ...axis() };
      if (out[name].title) out[name].title = { ...out[name].title, font: { size: 12.5 } };
    }
    return out;
  };
  const draw = () => {
    for (const place of document.querySelectorAll(".plot")) {
      const figure = JSON.parse(place.nextElementSibling.textContent);
      Plotly.react(place, figure.data, themed(figure.layout), { displayModeBar: false });
    }
  };
  draw();
  // Observe each chart's element, not the window: a scroll bar that appears with the charts narrows only the element.
  const fitted = new ResizeObserver((changed) => changed.forEach(({ target }) => Plotly.Plots.resize(target)));
  document.querySelectorAll(".plot").forEach((place) => fitted.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.documentElement.dataset.drawn = "yes";
})();
