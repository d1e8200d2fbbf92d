/* Search where the site is opened as a file.

   A browser starts no worker from a file, and the search runs in one. So its script runs in a hidden frame instead, which
   passes messages as a worker does. The theme would fetch such a script from elsewhere; its offline plugin leaves that
   where `polyfills` of mkdocs.yml names a file like this one. */

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          resolve(inside);
        });
      });
      frame.srcdoc = `<script src="${url}"></script>`;
      document.body.append(frame);
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
