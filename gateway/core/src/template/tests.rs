use super::*;
use crate::json::Json;
use indexmap::IndexMap;

const VECTORS: &str = include_str!("../../../../tests/data/template/vectors.json");

fn value(json: &Json) -> Value {
    match json {
        Json::Array(items) => items.iter().map(value).collect::<Vec<_>>().into(),
        Json::Object(object) => {
            let members =
                object.iter().map(|(key, entry)| (Value::from(key.as_str()), value(entry)));
            Value::from_object(members.collect::<IndexMap<Value, Value>>())
        }
        scalar => scalar_value(scalar),
    }
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source.to_owned(), || 1_768_478_703).unwrap()
}

fn render(source: &str, variables: &str) -> Result<String, TemplateError> {
    template(source).render(value(&Json::parse(variables.as_bytes()).unwrap()))
}

#[test]
fn templates_render_as_jinja2_renders_them() {
    let vectors = Json::parse(VECTORS.as_bytes()).unwrap();
    let templates: IndexMap<&str, ChatTemplate> = vectors
        .get("templates")
        .and_then(Json::as_object)
        .unwrap()
        .iter()
        .map(|(name, source)| (name.as_str(), template(source.as_str().unwrap())))
        .collect();
    let cases = vectors.get("cases").and_then(Json::as_array).unwrap();
    assert!(cases.len() > 300, "{} cases", cases.len());
    let mut num_wrong = 0;
    for case in cases {
        let text = |key| case.get(key).and_then(Json::as_str);
        let variables = case.get("variables").unwrap();
        let found = templates[text("template").unwrap()].render(value(variables));
        let expected = match text("rendered") {
            Some(rendered) => Ok(rendered.to_owned()),
            None => Err(TemplateError::Raised(text("refused").unwrap().to_owned())),
        };
        if found != expected {
            num_wrong += 1;
            if num_wrong <= 8 {
                println!("{}", variables.to_compact());
                match (&found, &expected) {
                    (Ok(found), Ok(expected)) => {
                        let lines = found.lines().zip(expected.lines());
                        for (found, expected) in lines.filter(|(found, expected)| found != expected)
                        {
                            println!("  found    {found:?}\n  expected {expected:?}");
                        }
                    }
                    _ => println!("  found    {found:?}\n  expected {expected:?}"),
                }
            }
        }
    }
    assert_eq!(num_wrong, 0, "of {}", cases.len());
}

#[test]
fn the_templates_own_refusal_is_told_from_other_faults() {
    let found = render("{{ raise_exception('no ' ~ value) }}", r#"{"value":"tools"}"#);
    assert_eq!(found, Err(TemplateError::Raised("no tools".to_owned())));
    let found = render("line\n{{ value.missing.deeper }}", r#"{"value":{}}"#);
    let Err(TemplateError::Failed(message)) = found else { panic!("{found:?}") };
    assert!(message.contains("line 2"), "{message}");
    let found = ChatTemplate::new("{% if %}".to_owned(), || 0);
    assert!(matches!(found, Err(TemplateError::Syntax(_))));
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let endless = "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}{% endfor %}{% endfor %}{% endfor %}";
    assert_eq!(render(endless, "{}"), Err(TemplateError::TooLong));
    let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(matches!(render(recursive, "{}"), Err(TemplateError::Failed(_))));
}

#[test]
fn dates_are_written_as_strftime_writes_them() {
    // 2026-01-15 12:05:03 UTC was a Thursday
    let format = "%Y-%m-%d %H:%M:%S %I %p %B %b %A %a %y %e %-d %F %T %%";
    let source = format!("{{{{ strftime_now('{format}') }}}}");
    assert_eq!(
        render(&source, "{}").unwrap(),
        "2026-01-15 12:05:03 12 PM January Jan Thursday Thu 26 15 15 2026-01-15 12:05:03 %"
    );
    assert!(render("{{ strftime_now('%q') }}", "{}").is_err());
    for (unix_s, expected) in [
        (0, "1970-01-01 Thursday"),
        (951_782_400, "2000-02-29 Tuesday"),
        (-1, "1969-12-31 Wednesday"),
    ] {
        let template = match unix_s {
            0 => ChatTemplate::new("{{ strftime_now('%F %A') }}".into(), || 0),
            951_782_400 => ChatTemplate::new("{{ strftime_now('%F %A') }}".into(), || 951_782_400),
            _ => ChatTemplate::new("{{ strftime_now('%F %A') }}".into(), || -1),
        };
        assert_eq!(template.unwrap().render(Value::from(())).unwrap(), expected);
    }
}

#[test]
fn the_sentinel_passes_through_every_escape() {
    let variables = format!(r#"{{"{SENTINEL_VARIABLE}":"﷐","value":"a﷐é﷑"}}"#);
    let found = render("{{ value | tojson(ensure_ascii=True) }}", &variables).unwrap();
    assert_eq!(found, "\"a\u{fdd0}\\u00e9\\ufdd1\"");
}
