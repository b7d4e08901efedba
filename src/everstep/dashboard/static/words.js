// Words that a page needs and not everybody knows, with their meaning; docs/glossary.md has the same.

import { el } from "./dom.js";

export const WORDS = {
  agree: "All members exchange their records of a step. A member that has all of them knows that the step is decided.",
  decide: "The part of a recovery until the coordinator has a new plan.",
  digest: "A short hash of a state. Two runs with the same digest are equal to the bit.",
  generation: "The number of one agreed membership: who takes part, and who does which work. It grows with each change.",
  goodput: "The share of the running time that was training, without starts, waits, recoveries and steps done again.",
  heal: "To copy the state from members while they train on, and to catch up with them.",
  incarnation: "The number of a life of a worker, from 0; the word of programs for what people call a life.",
  lane: "A fixed slot of the global batch. Its samples do not depend on who computes it, so a lane may move to another worker.",
  leader: "The first member of a pool. It tells the coordinator of the steps and writes the manifests of checkpoints.",
  life: "One process in a worker's slot. Lives are counted from 0; programs call the number incarnation.",
  notice: "The part of a recovery until the fault is known.",
  recovery: "The whole way from a fault to the next committed step.",
  redo: "The part of a recovery until the interrupted step is done again.",
  regroup: "The part of a recovery until the members of the new plan are connected.",
  settle: "The first act of a new generation: members say which step they hold, and one rule says where all go on.",
  spare: "A worker that waits for a place.",
  stage: "A part of the model, held by a pool of workers. A model that is not split is one stage.",
  standby: "A member that keeps up without lanes, to take over at once.",
  step: "One update over one global batch. Step n: n updates have been applied.",
  unblock: "The part of a recovery until the members have left the old plan's transfers.",
};

/** A text with the meaning of a word as its tooltip; plain text where the word has none. */
export function term(word, text = word) {
  return WORDS[word] ? el("abbr", { title: WORDS[word] }, text) : text;
}

/** Give the elements that name a word in `data-word` its meaning, and fill the list of all words. */
export function explain(root) {
  for (const node of document.querySelectorAll("[data-word]")) node.title = WORDS[node.dataset.word];
  root.replaceChildren(...Object.entries(WORDS).map(([word, meaning]) => el("div", {}, el("dt", {}, word), el("dd", {}, meaning))));
}
