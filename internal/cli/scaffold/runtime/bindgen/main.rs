//! Writes the bindings of a component in C or Rust, and makes the component of its linked module.
use anyhow::{Context, Result, bail};
use std::{env, fs, path::Path};
use wasi_preview1_component_adapter_provider::WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER as ADAPTER;
use wit_bindgen_core::wit_parser::{Resolve, TypeDefKind, TypeOwner};
use wit_bindgen_core::{Files, WorldGenerator};
use wit_component::ComponentEncoder;

fn main() -> Result<()> {
    let args: Vec<String> = env::args().collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[1..] {
        ["c", wit, out] => bindings(wit, Path::new(out), c),
        ["rust", wit, out] => bindings(wit, Path::new(out), rust),
        ["component", module, out] => component(module, out),
        _ => bail!("usage: tripod-bindgen c | rust WIT DIRECTORY, or tripod-bindgen component MODULE OUTPUT"),
    }
}

/// Makes the generator of a language.
type Generator = fn(&Resolve) -> Result<Box<dyn WorldGenerator>>;

fn bindings(wit: &str, out: &Path, generator: Generator) -> Result<()> {
    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_path(wit)?;
    let world = resolve.select_world(&[package], Some("server"))?;
    let mut files = Files::default();
    generator(&resolve)?.generate(&mut resolve, world, &mut files)?;
    fs::create_dir_all(out)?;
    for (name, text) in files.iter() {
        match name.strip_suffix(".rs") {
            Some(_) => fs::write(out.join(name), older(str::from_utf8(text)?)? + include_str!("rt.rs"))?,
            None => fs::write(out.join(name), text)?,
        }
    }
    Ok(())
}

fn c(_: &Resolve) -> Result<Box<dyn WorldGenerator>> {
    use wit_bindgen_c::{Enabled, Opts};
    Ok(Opts { autodrop_borrows: Enabled::Yes, ..Opts::default() }.build())
}

/// All messages and enums have a default, as in protobuf; those of a oneof have none, because its absence is a None.
fn rust(resolve: &Resolve) -> Result<Box<dyn WorldGenerator>> {
    let mut opts = wit_bindgen_rust::Opts {
        format: true,
        generate_all: true,
        disable_run_ctors_once_workaround: true,
        disable_custom_section_link_helpers: true,
        runtime_path: Some("crate::bindings::rt".into()),
        ..Default::default()
    };
    for (_, t) in resolve.types.iter() {
        let (TypeOwner::Interface(owner), Some(name)) = (t.owner, &t.name) else { continue };
        let owner = resolve.id_of(owner).context("an interface without a name")?;
        let first = match &t.kind {
            TypeDefKind::Record(_) => None,
            TypeDefKind::Enum(e) => Some(&e.cases[0].name),
            TypeDefKind::Variant(v) if v.cases[0].ty.is_none() => Some(&v.cases[0].name),
            _ => continue,
        };
        opts.additional_type_attributes.push((format!("{owner}/{name}"), "#[derive(Default)]".into()));
        if let Some(first) = first {
            opts.additional_member_attributes.push((format!("{owner}/{name}.{first}"), "#[default]".into()));
        }
    }
    Ok(Box::new(opts.build()))
}

/// Writes what Rust before 1.82 does not know in its older form, which later ones know in the editions before 2024.
fn older(text: &str) -> Result<String> {
    let mut parts = text.split("#[unsafe");
    let mut out = "#![allow(unknown_lints, unused_unsafe)]\n".to_owned() + parts.next().unwrap_or_default();
    for part in parts {
        let attribute = part.trim_start().strip_prefix('(').and_then(|p| p.split_once(")]"));
        let (attribute, rest) = attribute.context("wit-bindgen writes another form of #[unsafe(NAME = VALUE)]")?;
        out += &format!("#[{}]{rest}", attribute.trim());
    }
    for (newer, older) in [
        ("unsafe extern \"C\" {", "extern \"C\" {"),
        ("(&raw mut _RET_AREA.0)", "::core::ptr::addr_of_mut!(_RET_AREA.0)"),
        (".cast_mut()", " as *mut u8"),
        ("::core::error::Error", "::std::error::Error"),
    ] {
        out = out.replace(newer, older);
    }
    Ok(out)
}

/// The adapter is used if the module imports WASI preview 1.
fn component(module: &str, out: &str) -> Result<()> {
    let module = fs::read(module)?;
    let mut encoder = ComponentEncoder::default();
    encoder.validate(true);
    encoder.module(&module)?.adapter("wasi_snapshot_preview1", ADAPTER)?;
    Ok(fs::write(out, encoder.encode()?)?)
}
