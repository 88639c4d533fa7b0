// A page opened as a file may not start a worker, which the search runs in: its script runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      const scope = (this.scope = frame.contentWindow)
      scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = scope.document.createElement("script")
      this.ready = new Promise(resolve => (script.onload = resolve))
      script.src = url
      scope.document.body.append(script)
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
