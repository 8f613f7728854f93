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

  // Marks that the server has not answered are kept by this tab, also while it loads the page again.
  const place = `trakdask ${window.location.pathname}`
  const unanswered = () => JSON.parse(window.sessionStorage.getItem(place) ?? "[]")
  const remember = (marks) => window.sessionStorage.setItem(place, JSON.stringify(marks))
  const sendMark = (message) => {
    const sent = { ...message, at: Date.now() }
    if (model.follows_address) remember([...unanswered(), sent])
    model.send_msg(sent)
  }
  // A message about a mark is shown for a while.
  let forgetting
  model.on("said", () => {
    remember(unanswered().filter(({ at }) => at > model.said.answered))
    clearTimeout(forgetting)
    const [place, { text, undo }] = [root.querySelector(".said"), model.said]
    place.querySelector("span").textContent = text ?? ""
    const button = place.querySelector("button")
    button.hidden = !undo
    button.textContent = undo > 1 ? `Undo (${undo})` : "Undo"
    forgetting = setTimeout(() => place.matches(":hover, :focus-within") || (place.hidden = true), 20000)
    place.hidden = !text
  })

  // Only what has changed is replaced, so that what somebody types elsewhere stays.
  const update = (parent, nodes) => {
    nodes.forEach((node, i) => {
      const old = parent.children[i]
      node.source = node.outerHTML
      if (old?.localName === "main") update(old, [...node.children])
      else if (!old) parent.append(node)
      else if (old.source !== node.source) old.replaceWith(node)
    })
    while (parent.children.length > nodes.length) parent.lastElementChild.remove()
  }
  const draw = () => {
    const fresh = document.createElement("div")
    fresh.innerHTML = model.html
    update(root, [...fresh.children])
    mark()
    if (model.follows_address) document.title = `${root.querySelector("h1").textContent} – trakdask`
    restore()
    const first = isTurning && root.querySelector("section[aria-busy=false] .card header a")
    if (first) {
      first.focus()
      isTurning = false
    }
  }

  // Arrow keys move between the samples of a page; 1, 2 and 3 mark the one with the focus.
  let isTurning = false
  const move = (key) => {
    const cards = [...root.querySelectorAll(".card")]
    const active = root.getRootNode().activeElement
    const card = active?.closest(".card")
    if (active?.closest(".wide") || !cards.length || (!card && key !== "ArrowRight")) return false
    const isBeside = ({ parentElement, offsetTop }) => (
      parentElement === card?.parentElement && offsetTop === card.offsetTop
    )
    const below = cards.filter(isBeside).length
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: below, ArrowUp: -below }[key]
    const next = cards[cards.indexOf(card) + step]
    const more = key === "ArrowRight" && card?.closest("section").querySelector("a[rel=next]")
    if (next) next.querySelector("header a").focus()
    else if (more) {
      isTurning = true
      more.click()
    }
    return Boolean(next || more)
  }
  const press = (selector) => {
    const button = root.querySelector(selector)
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
  // The history keeps how far a page was scrolled, and which link had the focus.
  let left = null
  let restoring = null
  const go = (query) => {
    const link = root.getRootNode().activeElement?.closest("a[href]")
    left = { top: window.scrollY, focus: link?.getAttribute("href") }
    restoring = null
    model.send_msg({ query })
  }
  model.on("query", () => {
    if (!model.follows_address || !left) return // who goes back has the address already
    const search = address()
    if (search === window.location.search) return
    window.history.replaceState(left, "")
    window.history.pushState({}, "", search)
    left = null
  })
  // Sections come one after the other, so this is done again until the page is complete.
  const restore = () => {
    if (!restoring || address() !== window.location.search.replace(/^$/, window.location.pathname)) return
    const links = [...root.querySelectorAll("a[href]")]
    links.find((link) => link.getAttribute("href") === restoring.focus)?.focus({ preventScroll: true })
    window.scrollTo(0, restoring.top)
    if (!root.querySelector("[aria-busy=true]")) restoring = null
  }

  root.addEventListener("click", (event) => {
    const button = event.target.closest("button")
    const { mark, sample, of, wanted, save, undo } = button?.dataset ?? {}
    if (mark) {
      const isWanted = wanted ? wanted === "1" : button.getAttribute("aria-pressed") !== "true"
      sendMark({ mark, wanted: isWanted, ...(of ? { of } : { sample: Number(sample) }) })
    } else if (save) model.send_msg({ save })
    else if (undo) model.send_msg({ undo: true })
    else if (button?.matches(".line *")) {
      const line = button.previousElementSibling
      window.getSelection().selectAllChildren(line)
      navigator.clipboard?.writeText(line.textContent) // which plain HTTP to another machine lacks
      button.textContent = navigator.clipboard ? "Copied" : "Press Ctrl-C"
    }
    const link = event.target.closest("a[href^='?']")
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return
    event.preventDefault()
    go(link.getAttribute("href"))
    if (!link.closest(".orders, .bars, .facets, dl, thead")) window.scrollTo(0, 0)
  })
  root.addEventListener("submit", async (event) => {
    event.preventDefault()
    const data = new FormData(event.target)
    if ("new" in event.target.dataset) {
      const given = Object.fromEntries(data)
      if (given.image) given.image = await given.image.arrayBuffer()
      left = {}
      model.send_msg({ new: given })
    } else go(`?${new URLSearchParams(data)}`)
  })
  root.addEventListener("change", ({ target }) => {
    const { name, value, files, dataset: { mark, sample, most } } = target
    if (mark) sendMark({ mark, sample: Number(sample), wanted: true, [name]: value })
    else if (target.matches("select")) target.form.requestSubmit()
    else if (files) {
      // The chosen image is shown; one that is too large for the connection is not sent.
      const image = target.parentElement.querySelector("img")
      const isLarge = files[0]?.size > Number(most)
      target.setCustomValidity(isLarge ? target.title : "")
      target.reportValidity()
      URL.revokeObjectURL(image.src)
      image.hidden = !files.length || isLarge
      image.src = image.hidden ? "" : URL.createObjectURL(files[0])
    }
  })
  model.on("saved", () => {
    for (const [name, content] of Object.entries(model.saved)) {
      const href = URL.createObjectURL(new Blob([content])) // a text or bytes
      Object.assign(document.createElement("a"), { href, download: name }).click()
      URL.revokeObjectURL(href)
    }
  })
  const back = (event) => {
    left = null
    model.send_msg({ query: window.location.search })
    restoring = event.state?.top === undefined ? null : event.state
  }
  const type = (event) => {
    const isTyping = event.composedPath()[0].matches?.("input, textarea, select")
    if (root.querySelector(".lost") || isTyping || event.shiftKey || event.altKey) return
    let isUsed = false
    if (event.ctrlKey || event.metaKey) isUsed = event.key === "z" && press("button[data-undo]:not([hidden])")
    else if (event.key.startsWith("Arrow")) isUsed = move(event.key)
    else if ("123".includes(event.key)) {
      const card = root.querySelector(".card:focus-within")
      isUsed = press(`${card ? ".card:focus-within" : ".one"} button[data-key="${event.key}"]`)
    } else if ("np".includes(event.key)) isUsed = press(`main a[rel=${event.key === "n" ? "next" : "prev"}]`)
    if (isUsed) event.preventDefault()
  }
  const keys = model.follows_address ? window : root
  keys.addEventListener("keydown", type)
  if (model.follows_address) {
    window.addEventListener("popstate", back)
    window.history.scrollRestoration = "manual"
    model.document.on_event("connection_lost", () => {
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
    })
    document.body.style.margin = "0"
    document.documentElement.style.colorScheme = "light dark"
    document.body.style.background = "light-dark(#ffffff, #16181c)"
  } else root.style.minHeight = "0" // a part of a notebook
  model.on("remove", () => {
    window.removeEventListener("popstate", back)
    keys.removeEventListener("keydown", type)
  })
  model.on("html", draw)
  model.on("marked", mark)
  draw()
  model.send_msg({ shown: true })
  if (model.follows_address) unanswered().forEach((message) => model.send_msg(message))
  return root
}
