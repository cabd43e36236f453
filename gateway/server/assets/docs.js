// Shows openapi.json to people: routes by tag, their bodies as tables, the schemas behind them.
"use strict";

const place = document.getElementById("document");

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function nameOf(reference) {
  return reference.split("/").pop();
}

function resolved(api, value) {
  if (!value || !value.$ref) return value;
  const path = value.$ref.replace("#/", "").split("/");
  return path.reduce((inner, key) => inner[key], api);
}

// The type in words; schemas are links to their own place on the page.
function typeInto(cell, schema) {
  if (schema.$ref) {
    const link = element("a", nameOf(schema.$ref));
    link.href = "#" + nameOf(schema.$ref);
    cell.append(link);
    return;
  }
  const options = schema.oneOf || schema.anyOf;
  if (options && !schema.properties) {
    options.forEach((option, index) => {
      if (index) cell.append(" or ");
      typeInto(cell, option);
    });
    return;
  }
  if (schema.allOf) {
    schema.allOf.forEach((part, index) => {
      if (index) cell.append(" and ");
      typeInto(cell, part);
    });
    return;
  }
  if (schema.const !== undefined) cell.append(JSON.stringify(schema.const));
  else if (schema.enum) cell.append(schema.enum.map((value) => JSON.stringify(value)).join(" | "));
  else if (schema.type === "array") {
    cell.append("list of ");
    typeInto(cell, schema.items || {});
  } else if (schema.properties) {
    const required = new Set(schema.required || []);
    const keys = Object.keys(schema.properties).map((key) => key + (required.has(key) ? "" : "?"));
    cell.append("{" + keys.join(", ") + "}");
  } else cell.append([].concat(schema.type || "anything").join(" or "));
  const bounds = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["maxItems", "at most"],
    ["maxLength", "length ≤"], ["minItems", "at least"]];
  const told = bounds.filter(([key]) => schema[key] !== undefined);
  if (told.length) cell.append(" " + told.map(([key, sign]) => `${sign} ${schema[key]}`).join(", "));
  if (schema.default !== undefined) cell.append(" = " + JSON.stringify(schema.default));
}

function tableOf(rows) {
  const table = element("table");
  const head = element("tr");
  ["Name", "Type", ""].forEach((title) => head.append(element("th", title)));
  table.append(head);
  for (const [name, schema, words] of rows) {
    const row = element("tr");
    row.append(element("td", name));
    const type = element("td", undefined, "type");
    typeInto(type, schema);
    row.append(type, element("td", words || ""));
    table.append(row);
  }
  return table;
}

function schemaInto(place, schema) {
  if (schema.description) place.append(element("p", schema.description));
  if (schema.properties) {
    const required = new Set(schema.required || []);
    place.append(tableOf(Object.entries(schema.properties).map(([key, inner]) =>
      [key + (required.has(key) ? " *" : ""), inner, inner.description])));
  } else if (schema.allOf) {
    for (const part of schema.allOf) {
      if (part.properties) schemaInto(place, part);
      else {
        const line = element("p", "and ");
        typeInto(line, part);
        place.append(line);
      }
    }
  } else {
    const line = element("p");
    typeInto(line, schema);
    place.append(line);
  }
}

function operationOf(api, path, method, operation) {
  const section = element("section", undefined, "operation");
  section.id = operation.operationId;
  const title = element("h3");
  title.append(element("span", method, "method"), path);
  section.append(title, element("p", operation.summary));
  if (operation.description) section.append(element("p", operation.description));
  const details = element("details");
  details.append(element("summary", "Body and answers"));
  const parameters = (operation.parameters || []).map((value) => resolved(api, value));
  if (parameters.length) {
    details.append(element("h4", "Parameters"), tableOf(parameters.map((parameter) =>
      [`${parameter.name} (${parameter.in})`, parameter.schema, parameter.description])));
  }
  if (operation.requestBody) {
    const body = operation.requestBody.content["application/json"];
    details.append(element("h4", "Body"));
    schemaInto(details, resolved(api, body.schema));
    if (body.example) details.append(element("pre", JSON.stringify(body.example, null, 2)));
  }
  const answers = Object.entries(operation.responses).map(([status, value]) => {
    const answer = resolved(api, value);
    const schemas = Object.values(answer.content || {}).map((content) => content.schema);
    return [status, { anyOf: schemas.length ? schemas : [{}] }, answer.description];
  });
  details.append(element("h4", "Answers"), tableOf(answers));
  section.append(details);
  return section;
}

function show(api) {
  document.getElementById("version").textContent = api.info.version;
  place.replaceChildren(element("p", api.info.description));
  for (const tag of api.tags) {
    place.append(element("h2", tag.name));
    for (const [path, item] of Object.entries(api.paths)) {
      for (const [method, operation] of Object.entries(item)) {
        if (operation.tags.includes(tag.name)) place.append(operationOf(api, path, method, operation));
      }
    }
  }
  place.append(element("h2", "Schemas"));
  for (const [name, schema] of Object.entries(api.components.schemas)) {
    const section = element("section", undefined, "operation");
    section.id = name;
    section.append(element("h3", name));
    schemaInto(section, schema);
    place.append(section);
  }
}

fetch("openapi.json")
  .then((response) => {
    if (!response.ok) throw new Error(`openapi.json gave the status ${response.status}`);
    return response.json();
  })
  .then(show)
  .catch((error) => place.replaceChildren(element("p", String(error), "error")));
