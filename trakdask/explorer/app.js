// Shows HTML, tells Python which link, form or button was used, and keeps the address up to date.

export function render({ model }) {
  const root = document.createElement("div")
  root.className = "trakdask"

  const mark = () => {
    const marked = new Set(model.marked)
    for (const button of root.querySelectorAll("button[data-key]")) {
      button.setAttribute("aria-pressed", marked.has(`${button.dataset.sample} ${button.dataset.mark}`))
    }
    for (const count of root.querySelectorAll("[data-count]")) {
      count.textContent = new Set(model.marked.map((key) => key.split(" ")[0])).size
      count.hidden = !marked.size
    }
  }

  // A message about a mark is shown for a while, beside its sample if the page shows the sample.
  let forgetting
  const say = () => {
    clearTimeout(forgetting)
    for (const old of root.querySelectorAll(".said")) old.replaceChildren()
    const { sample, text, undo } = model.said
    if (!text) return
    const marks = root.querySelector(`.marks[data-sample="${sample}"]`)
    let place = marks ? marks.querySelector(".said") : root.querySelector("[data-said]")
    if (!place) {
      place = Object.assign(document.createElement("div"), { className: "said" })
      place.setAttribute("role", "status")
      marks.append(place)
    }
    place.append(text)
    forgetting = setTimeout(() => place.matches(":hover, :focus-within") || place.replaceChildren(), 20000)
    if (!undo) return
    const button = Object.assign(document.createElement("button"), { type: "button" })
    button.textContent = undo > 1 ? `Undo (${undo})` : "Undo"
    button.title = "Ctrl-Z"
    button.dataset.undo = ""
    place.append(" ", button)
  }

  // Marks that the server has not answered are kept by this tab, also while it loads the page again.
  const place = `trakdask ${window.location.pathname}`
  const unanswered = () => JSON.parse(window.sessionStorage.getItem(place) ?? "[]")
  const sendMark = (message) => {
    const marks = [...unanswered(), { ...message, at: Date.now() }]
    if (model.follows_address) window.sessionStorage.setItem(place, JSON.stringify(marks))
    model.send_msg(marks.at(-1))
  }
  const forget = () => {
    const left = unanswered().filter(({ at }) => at > model.said.answered)
    window.sessionStorage.setItem(place, JSON.stringify(left))
  }

  let isLost = false
  const lose = () => {
    isLost = true
    for (const part of root.children) part.inert = true
    const banner = Object.assign(document.createElement("div"), { className: "message error lost" })
    banner.setAttribute("role", "alert")
    const marks = unanswered().map(({ sample, mark, wanted }) => (
      `${sample === undefined ? "several samples" : `sample ${sample}`} ${wanted ? "as" : "no longer as"} ${mark}`
    ))
    banner.textContent = "The server has stopped; nothing is kept from here on. This page goes on when it is back "
      + "at this address. If it was started again, it has printed a new address."
      + (marks.length ? ` Not kept yet, but sent when it is back: ${marks.join(", ")}.` : "")
    root.prepend(banner)
    setInterval(async () => {
      const answer = await fetch("favicon.ico", { cache: "no-store" }).catch(() => null)
      if (answer?.ok) window.location.reload()
    }, 2000)
  }

  // Only what has changed is replaced, so that what somebody types elsewhere stays.
  const update = (parent, nodes) => {
    nodes.forEach((node, i) => {
      const old = parent.children[i]
      const source = node.outerHTML
      if (old !== undefined && old.localName === "main" && node.localName === "main") {
        update(old, [...node.children])
      } else if (old === undefined || old.source !== source) {
        node.source = source
        for (const child of node.localName === "main" ? node.children : []) child.source = child.outerHTML
        if (old === undefined) parent.append(node)
        else old.replaceWith(node)
      }
    })
    while (parent.children.length > nodes.length) parent.lastElementChild.remove()
  }
  const draw = () => {
    const fresh = document.createElement("div")
    fresh.innerHTML = model.html
    update(root, [...fresh.children])
    mark()
    say()
    if (model.follows_address) {
      const title = root.querySelector("h1")?.textContent
      document.title = title ? `${title} – trakdask` : "trakdask"
    }
    restore()
    const first = isTurning && root.querySelector("section[aria-busy=false] .card header a")
    if (first) {
      first.focus()
      isTurning = false
    }
  }

  // Arrow keys move between the samples of a page; 1, 2 and 3 mark the one with the focus.
  let isTurning = false
  const center = (card) => {
    const { left, right, top, bottom } = card.getBoundingClientRect()
    return [(left + right) / 2, (top + bottom) / 2]
  }
  const neighbour = (cards, card, key) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[key]
    if (step) return cards[cards.indexOf(card) + step]
    const [x, y] = center(card)
    const way = key === "ArrowDown" ? 1 : -1
    const distance = (other) => Math.hypot(center(other)[0] - x, center(other)[1] - y)
    const beyond = cards.filter((other) => way * (center(other)[1] - y) > card.offsetHeight / 2)
    return beyond.sort((a, b) => distance(a) - distance(b))[0]
  }
  const move = (key) => {
    const cards = [...root.querySelectorAll(".card")]
    const active = root.getRootNode().activeElement
    const card = active?.closest(".card")
    if (active?.closest(".wide") || !cards.length || (!card && key !== "ArrowRight")) return false
    const next = card ? neighbour(cards, card, key) : cards[0]
    const more = card?.closest("section").querySelector("a[rel=next]")
    if (next) next.querySelector("header a").focus()
    else if (more && key === "ArrowRight") {
      isTurning = true
      more.click()
    }
    return Boolean(next || more)
  }
  const pressMark = (key) => {
    const card = root.getRootNode().activeElement?.closest(".card") ?? root.querySelector(".one")
    const button = card?.querySelector(`button[data-key="${key}"]`)
    button?.click()
    return Boolean(button)
  }

  // Parameters of the address that are not part of a view, such as a token, are kept.
  const address = () => {
    const kept = new URLSearchParams(window.location.search)
    for (const name of model.names) kept.delete(name)
    const text = [model.query, kept.toString()].filter((part) => part).join("&")
    return text ? `?${text}` : window.location.pathname
  }
  // A file is sent as base64; one that is too large for the connection is not read at all.
  const explain = async (form) => {
    const given = {}
    for (const [name, value] of new FormData(form)) {
      if (!(value instanceof File)) given[name] = value
      else if (value.size > Number(form.dataset.most)) given.too_large = String(value.size)
      else if (value.size) given[name] = await encoded(value)
    }
    left = {}
    model.send_msg({ new: given })
  }
  const preview = async (input) => {
    const image = Object.assign(document.createElement("img"), { alt: "the chosen image" })
    image.src = `data:;base64,${await encoded(input.files[0])}`
    input.parentElement.querySelector("img")?.remove()
    input.after(image)
  }
  const encoded = (file) => new Promise((resolve) => {
    const reader = new FileReader()
    reader.onload = () => resolve(reader.result.split(",")[1])
    reader.onerror = () => resolve("")
    reader.readAsDataURL(file)
  })
  // The history keeps how far a page was scrolled, and which link had the focus.
  let left = null
  let restoring = null
  const go = (query) => {
    const link = root.getRootNode().activeElement?.closest("a[href]")
    left = { top: window.scrollY, focus: link?.getAttribute("href") }
    restoring = null
    model.send_msg({ query })
  }
  const navigate = () => {
    if (!model.follows_address || !left) return // who goes back has the address already
    const search = address()
    if (search === window.location.search) return
    window.history.replaceState(left, "")
    window.history.pushState({}, "", search)
    left = null
  }
  // Sections come one after the other, so this is done again until the page is complete.
  const restore = () => {
    if (!restoring || address() !== window.location.search.replace(/^$/, window.location.pathname)) return
    const links = [...root.querySelectorAll("a[href]")]
    links.find((link) => link.getAttribute("href") === restoring.focus)?.focus({ preventScroll: true })
    window.scrollTo(0, restoring.top)
    if (!root.querySelector("[aria-busy=true]")) restoring = null
  }

  root.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-mark]")
    if (button) {
      const { mark, sample, of, wanted } = button.dataset
      const isWanted = wanted ? wanted === "1" : button.getAttribute("aria-pressed") !== "true"
      sendMark({ mark, wanted: isWanted, ...(of ? { of } : { sample: Number(sample) }) })
      return
    }
    const copy = event.target.closest("button[data-copy]")
    if (copy) {
      const line = copy.previousElementSibling
      window.getSelection().selectAllChildren(line)
      navigator.clipboard?.writeText(line.textContent) // which plain HTTP to another machine lacks
      copy.textContent = navigator.clipboard ? "Copied" : "Press Ctrl-C"
      return
    }
    if (event.target.closest("button[data-undo]")) {
      model.send_msg({ undo: true })
      return
    }
    const saving = event.target.closest("button[data-save]")
    if (saving) {
      model.send_msg({ save: saving.dataset.save })
      return
    }
    const link = event.target.closest("a[href^='?']")
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return
    event.preventDefault()
    go(link.getAttribute("href"))
    if (!link.closest(".orders, .bars, .facets, dl, thead")) window.scrollTo(0, 0)
  })
  root.addEventListener("submit", (event) => {
    event.preventDefault()
    if ("new" in event.target.dataset) explain(event.target)
    else go(`?${new URLSearchParams(new FormData(event.target))}`)
  })
  root.addEventListener("change", (event) => {
    const { name, value, dataset: { mark, sample } } = event.target
    if (mark) sendMark({ mark, sample: Number(sample), wanted: true, [name]: value })
    else if (event.target.matches("select")) event.target.form.requestSubmit()
    else if (event.target.files?.[0]?.size <= Number(event.target.form.dataset.most)) preview(event.target)
  })
  const save = () => {
    for (const [name, text] of Object.entries(model.saved)) {
      const bytes = Uint8Array.from(window.atob(text), (character) => character.charCodeAt(0))
      const link = document.createElement("a")
      link.href = URL.createObjectURL(new Blob([bytes]))
      link.download = name
      link.click()
      URL.revokeObjectURL(link.href)
    }
  }
  const back = (event) => {
    left = null
    model.send_msg({ query: window.location.search })
    restoring = event.state?.top === undefined ? null : event.state
  }
  const press = (event) => {
    const isTyping = event.composedPath()[0].matches?.("input, textarea, select")
    if (isLost || isTyping || event.shiftKey || event.altKey) return
    let isUsed = false
    if (event.ctrlKey || event.metaKey) {
      isUsed = event.key === "z" && model.said.undo > 0
      if (isUsed) model.send_msg({ undo: true })
    } else if (event.key.startsWith("Arrow")) isUsed = move(event.key)
    else if ("123".includes(event.key)) isUsed = pressMark(event.key)
    else if ("np".includes(event.key)) {
      const link = root.querySelector(`main a[rel=${event.key === "n" ? "next" : "prev"}]`)
      link?.click()
      isUsed = Boolean(link)
    }
    if (isUsed) event.preventDefault()
  }
  const keys = model.follows_address ? window : root
  keys.addEventListener("keydown", press)
  if (model.follows_address) {
    window.addEventListener("popstate", back)
    window.history.scrollRestoration = "manual"
    model.document.on_event("connection_lost", lose)
    document.body.style.margin = "0"
    document.documentElement.style.colorScheme = "light dark"
    document.body.style.background = "light-dark(#ffffff, #16181c)"
  } else root.style.minHeight = "0" // a part of a notebook
  model.on("remove", () => {
    window.removeEventListener("popstate", back)
    keys.removeEventListener("keydown", press)
  })
  model.on("html", draw)
  model.on("marked", mark)
  model.on("said", say)
  model.on("said", forget)
  model.on("saved", save)
  model.on("query", navigate)
  draw()
  model.send_msg({ shown: true })
  if (model.follows_address) unanswered().forEach((message) => model.send_msg(message))
  return root
}
