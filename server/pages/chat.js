// The view `chat`: a conversation or a completion. Each message can be edited and continued from.

import { at, el } from "./dom.js";
import { entry, generate, summary, Tokens } from "./reply.js";

const WHO = { user: "You", assistant: "Model", tool: "Tool result" };

export class ChatView {
  constructor(server) {
    [this.server, this.turns, this.running] = [server, [], null];
    at("composer").addEventListener("submit", event => {
      event.preventDefault();
      this.submit();
    });
    at("say").addEventListener("keydown", event => this.key(event));
    for (const example of at("examples").children) {
      example.addEventListener("click", () => {
        at("say").value = example.textContent;
        this.submit();
      });
    }
    at("stop").addEventListener("click", () => this.running?.abort());
    at("clear").addEventListener("click", () => this.cut(0));
    for (const mode of ["chat", "completion"]) {
      at(`mode-${mode}`).addEventListener("change", () => this.become(mode));
    }
    at("settings").open = matchMedia("(min-width: 60rem)").matches;
    this.become(at("mode-completion").checked ? "completion" : "chat");
  }

  // Disables the settings that this server's model does not support, and shows why.
  meet() {
    const { endpoints, engine } = this.server.capabilities;
    at("colours").replaceChildren(...["target", ...(engine.proposers ?? [])].map(source => entry(source)));
    const fields = endpoints["/v1/chat/completions"];
    for (const [field, id] of [["tools", "tools"], ["response_format", "schema"]]) {
      const refused = fields[field].status === "refused";
      at(id).disabled = refused;
      at(`${id}-problem`).textContent = refused ? `Not available: ${fields[field].reason}.` : "";
    }
  }

  key(event) {
    const sends = event.ctrlKey || event.metaKey || (this.mode === "chat" && !event.shiftKey);
    if (event.key !== "Enter" || !sends || event.isComposing) return;
    event.preventDefault();
    at("composer").requestSubmit();
  }

  become(mode) {
    if (mode === this.mode) return;
    this.running?.abort();
    this.mode = at("view-chat").dataset.mode = mode;
    at("say-label").textContent = mode === "chat" ? "Message" : "Prompt";
    at("send").textContent = mode === "chat" ? "Send" : "Generate";
    at("say-keys").textContent = mode === "chat" ? "Enter sends the message, Shift+Enter inserts a line break." : "Ctrl+Enter generates a completion.";
    this.cut(0);
  }

  // Removes this turn and all later ones.
  cut(index) {
    this.running?.abort();
    for (const turn of this.turns.splice(index)) turn.element.remove();
    at("empty").hidden = this.turns.length > 0;
  }

  add(turn) {
    this.turns.push(turn);
    at("conversation").append(turn.element);
    at("empty").hidden = true;
    scrollTo(0, document.body.scrollHeight);
    return turn;
  }

  async submit() {
    const text = at("say").value;
    if (this.running || !text.trim()) return;
    if (this.mode === "completion") {
      this.cut(0);
      await this.answer(text);
      return;
    }
    if (this.asked() === null) return;
    at("say").value = "";
    this.add(new Turn(this, { role: "user", content: text.trim() }));
    await this.answer();
  }

  // Returns the request fields from the settings; null if the tools or the schema are invalid.
  asked() {
    const schema = parsed("schema", value => typeof value === "object" && !Array.isArray(value));
    const tools = this.mode === "chat" ? parsed("tools", Array.isArray) : undefined;
    if (schema === null || tools === null) {
      at("settings").open = true;
      return null;
    }
    const body = { model: this.server.model, temperature: at("temperature").valueAsNumber || 0 };
    if (at("max-tokens").value) body.max_tokens = at("max-tokens").valueAsNumber;
    if (at("seed").value) body.seed = at("seed").valueAsNumber;
    if (tools?.length) body.tools = tools;
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "reply", schema } };
    return body;
  }

  messages() {
    const system = at("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    const said = one => one.content || one.tool_calls || one.role !== "assistant"; // not a failed turn
    return [...first, ...this.turns.map(turn => turn.message).filter(said)];
  }

  // Requests a reply to the conversation, or the continuation of `begun`.
  async answer(begun = "") {
    const body = this.asked();
    if (body === null) return;
    let path = "v1/completions";
    if (this.mode === "completion") body.prompt = begun;
    else {
      path = "v1/chat/completions";
      body.messages = this.messages();
      body.stream_options = { continuous_usage_stats: true }; // counts thinking tokens
      if (begun) {
        body.messages.push({ role: "assistant", content: begun });
        body.continue_final_message = true;
        body.add_generation_prompt = false;
      }
    }
    const turn = this.add(new Turn(this, { role: "assistant", content: begun }));
    this.running = new AbortController();
    this.busy(true);
    try {
      await turn.run(path, body, this.running.signal);
    } finally {
      this.running = null;
      this.busy(false);
    }
  }

  busy(is) {
    at("view-chat").classList.toggle("running", is);
    at("conversation").setAttribute("aria-busy", String(is));
    at("send").hidden = is;
    at("stop").hidden = !is;
  }

  // Replaces the text of a turn, drops later turns and requests a reply.
  async goOn(turn, text) {
    const { role } = turn.message;
    this.cut(this.turns.indexOf(turn));
    if (role === "assistant") return this.answer(text);
    this.add(new Turn(this, { ...turn.message, content: text }));
    return this.answer();
  }

  async again(turn) {
    this.cut(this.turns.indexOf(turn));
    await this.answer(turn.begun);
  }

  // Adds the results of a turn's tool calls and requests a reply.
  async results(turn, contents) {
    this.cut(this.turns.indexOf(turn) + 1);
    turn.message.tool_calls.forEach(({ id }, index) =>
      this.add(new Turn(this, { role: "tool", tool_call_id: id, content: contents[index] })));
    await this.answer();
  }
}

// The value of a JSON box: undefined if it is empty; null, with a message shown, if it is invalid.
function parsed(id, fits) {
  const text = at(id).value.trim();
  let [value, problem] = [undefined, ""];
  try {
    if (text) value = JSON.parse(text);
    if (value !== undefined && (value === null || !fits(value))) problem = at(id).dataset.wanted;
  } catch (error) {
    problem = `This is not valid JSON: ${error.message}.`;
  }
  at(`${id}-problem`).textContent = problem;
  at(id).setAttribute("aria-invalid", String(problem !== ""));
  return problem ? null : value;
}

// One message: its element, and the message as sent.
class Turn {
  constructor(view, message) {
    [this.view, this.message, this.begun] = [view, message, message.content];
    this.thoughts = el("div", {});
    this.thought = el("details", { class: "thought", open: true, hidden: true },
      el("summary", {}, "Thinking"), this.thoughts);
    this.text = el("div", { class: "text" }, message.content);
    this.legend = el("ul", { class: "legend", "aria-label": "Tokens by proposer" });
    this.facts = el("p", { class: "facts" });
    this.more = el("div");
    const edit = message.role === "tool" ? null : button("Edit", () => this.edit());
    this.actions = el("div", { class: "actions" }, edit);
    const who = view.mode === "completion" ? "Text" : WHO[message.role];
    this.element = el("li", { class: `turn ${message.role}` },
      el("h3", {}, who), this.thought, this.text, this.more, this.legend, this.facts, this.actions);
  }

  async run(path, body, signal) {
    const tokens = new Tokens(this.text, this.legend, this.thoughts);
    this.element.classList.add("coming");
    try {
      const whole = await generate(path, body, signal, (part, { usage }) => {
        const thought = usage?.completion_tokens_details.reasoning_tokens;
        following(() => this.show(tokens, part.tokens, thought));
      });
      following(() => this.end(whole));
    } catch (error) {
      this.more.append(el("p", { class: "error", role: "alert" }, error.message));
      this.actions.append(button("Try again", () => this.view.again(this)));
    } finally {
      this.element.classList.remove("coming");
    }
  }

  // Collapses the thinking once, when the answer begins.
  show(tokens, more, thought) {
    const answered = tokens.spans.length > tokens.thought;
    tokens.push(more, thought);
    this.thought.hidden = !tokens.thought;
    if (tokens.thought && !answered && tokens.spans.length > tokens.thought) this.thought.open = false;
  }

  end(whole) {
    this.facts.textContent = summary(whole);
    this.message.content = this.begun + whole.text;
    if (whole.calls.length && whole.finish !== "stopped") {
      this.message = { ...this.message, content: whole.text || null, tool_calls: whole.calls };
      this.calls(whole.calls);
    } else {
      this.actions.append(button("Regenerate", () => this.view.again(this)));
      const goes = whole.finish === "length" || whole.finish === "stopped";
      const content = this.message.content;
      if (goes && content) this.actions.append(button("Continue", () => this.view.goOn(this, content)));
    }
  }

  // Shows tool calls as cards with boxes for their results; the reply's tokens are collapsed.
  calls(calls) {
    const folded = el("details", {}, el("summary", {}, "Tokens of this reply"));
    this.text.replaceWith(folded);
    folded.append(this.text);
    this.actions.replaceChildren(button("Regenerate", () => this.view.again(this)));
    const boxes = calls.map(({ id }) => el("textarea", { id: `result-${id}`, rows: "2" }));
    const form = el("form", { class: "calls" }, ...calls.flatMap((call, index) => [
      el("div", { class: "call" }, el("b", {}, call.function.name),
        el("pre", {}, pretty(call.function.arguments))),
      el("label", { for: boxes[index].id }, `Result of ${call.function.name}`), boxes[index],
    ]), el("div", { class: "buttons" }, el("button", {}, "Send results")));
    form.addEventListener("submit", event => {
      event.preventDefault();
      if (!this.view.running) this.view.results(this, boxes.map(box => box.value));
    });
    this.more.append(form);
  }

  edit() {
    if (this.view.running) return;
    const box = el("textarea", { "aria-label": "Edited text", rows: "4" });
    box.value = this.message.content ?? "";
    const form = el("form", { class: "edit" }, box, el("div", { class: "buttons" },
      el("button", { class: "primary" }, "Continue from here"),
      button("Cancel", () => this.element.replaceChildren(...kept))));
    const kept = [...this.element.childNodes];
    form.addEventListener("submit", event => {
      event.preventDefault();
      if (!this.view.running && box.value.trim()) this.view.goOn(this, box.value);
    });
    this.element.replaceChildren(kept[0], form);
    box.focus();
  }
}

// Applies `change`, and stays at the end of the page if it was in view before.
function following(change) {
  const end = innerHeight + scrollY > document.body.scrollHeight - 120;
  change();
  if (end) scrollTo(0, document.body.scrollHeight);
}

function button(text, press) {
  return el("button", { type: "button", onclick: press }, text);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
