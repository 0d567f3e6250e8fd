// Renders a small part of Markdown as DOM nodes. A model's answer is hostile input: every piece of it becomes
// the text of a node that is made here, never markup, an attribute or an address.
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
// Bounded, so that the time for a line stays in proportion to its length.
const INLINE = new RegExp(
  [
    "(?<tick>`{1,3})(?<code>.{1,1000}?)\\k<tick>",
    "\\*\\*(?<strong>\\S.{0,500}?)\\*\\*",
    "\\*(?<em>[^\\s*][^*]{0,500}?)\\*",
    "!?\\[(?<label>[^\\]]{0,500})\\]\\((?<address>[^()]{0,500})\\)",
  ].join("|"),
);

function element(name, content) {
  const made = document.createElement(name);
  made.append(content);
  return made;
}

// Appends one by one: a hostile line has more pieces than a call may have arguments.
function inline(name, text) {
  return extended(document.createElement(name), text);
}

function extended(parent, text) {
  for (let rest = text; rest; ) {
    const found = INLINE.exec(rest);
    parent.append(rest.slice(0, found?.index));
    if (found === null) break;
    const { code, strong, em, label, address } = found.groups;
    if (code !== undefined) parent.append(element("code", code));
    else if (strong !== undefined) parent.append(inline("strong", strong));
    else if (em !== undefined) parent.append(inline("em", em));
    else parent.append(`${label} (${address})`);
    rest = rest.slice(found.index + found[0].length);
  }
  return parent;
}

// Takes the lines of a code block from `lines`, to its closing fence or, without one, to the end.
function block(lines, fence) {
  const code = [];
  while (lines.length) {
    const line = lines.pop();
    const end = line.trim();
    if (end.startsWith(fence) && end === fence[0].repeat(end.length)) break;
    code.push(line);
  }
  const made = element("pre", element("code", code.join("\n")));
  made.tabIndex = 0;
  return made;
}

export function render(text) {
  const made = document.createDocumentFragment();
  const lines = text.split(/\r?\n/).reverse();
  let open = null; // the paragraph or list that the next line may continue
  while (lines.length) {
    const line = lines.pop();
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    if (fence || heading || !line.trim()) {
      open = null;
      if (fence) made.append(block(lines, fence[1]));
      // Below the headings of the page.
      else if (heading) made.append(inline(`h${Math.min(6, heading[1].length + 3)}`, heading[2]));
    } else if (item) {
      const name = item[1] === undefined ? "ul" : "ol";
      if (open?.localName !== name) {
        open = document.createElement(name);
        if (name === "ol") open.start = Number(item[1]);
        made.append(open);
      }
      open.append(inline("li", item[2]));
    } else if (open === null) {
      open = inline("p", line);
      made.append(open);
    } else {
      extended(open.localName === "p" ? open : open.lastChild, `\n${line}`);
    }
  }
  return made;
}
