// The versions of a store's resources with their labels and differences, and its releases with their evidence.

import { h, table } from "../dom.js";
import { ago, asText } from "../format.js";
import { prompts } from "./run.js";

const key = (version) => (version ? `${version[0]} ${version[1]}` : "-");

export async function show(query, { get, link }) {
  const [data, released] = await Promise.all([get("resources", { run: query.run }), get("releases", { run: query.run })]);
  const labelsOf = (each) => data.labels.filter((label) => label.resources_id === each.resources_id && label.version === each.version);
  return {
    title: "Resources",
    trail: [["Runs", "#/"], ["Run", link("run", { run: query.run })]],
    body: [
      h("div", { class: "head" }, h("h1", null, "Resources and releases")),
      data.versions.length ? table("Versions", [
        { title: "resources", cell: (each) => `${each.resources_id} ${each.version}` },
        { title: "labels", cell: (each) => labelsOf(each).map((label) => h("span", { class: "tag" }, label.label)) },
        { title: "holds", cell: (each) => Object.entries(each.resources).map(([name, kind]) => `${name} (${kind})`).join(", ") },
        { title: "made from", cell: (each) => key(each.parent) },
        { title: "made", cell: (each) => ago(each.create_time) },
      ], data.versions) : h("p", { class: "quiet" }, "The store has no resources."),
      prompts(data.versions.flatMap((each) => each.prompts).reverse()),
      h("section", null, h("h2", null, "Releases"), released.releases.length ? released.releases.map((each) => h("details", { class: "card" },
        h("summary", null, `${each.release_id}: `, h("span", { class: "state" }, each.state), ` ${key(each.from_version)} → ${key(each.canary_version)}, ${ago(each.update_time)}`),
        h("dl", { class: "facts" }, Object.entries(each.details).map(([name, value]) => [h("dt", null, name), h("dd", null, asText(value))])))) : h("p", { class: "quiet" }, "Nothing was released from this store.")),
      released.audit.length ? h("section", null, h("h2", null, "Changes of labels"), table("Changes of labels", [
        { title: "change", cell: (each) => `${each.action} ${each.label ?? each.state ?? ""}` },
        { title: "from", cell: (each) => key(each.before) }, { title: "to", cell: (each) => key(each.after) },
        { title: "who", cell: (each) => each.who ?? "" }, { title: "why", cell: (each) => each.why ?? "" },
        { title: "when", cell: (each) => ago(each.time) },
      ], released.audit)) : null,
    ],
  };
}
