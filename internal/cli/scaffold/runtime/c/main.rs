//! Writes the bindings of a component in C, and makes the component of its linked module.
use anyhow::{Result, bail};
use std::{env, fs, path::Path};
use wasi_preview1_component_adapter_provider::WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER as ADAPTER;
use wit_bindgen_c::{Enabled, Opts};
use wit_bindgen_core::{Files, wit_parser::Resolve};
use wit_component::ComponentEncoder;

fn main() -> Result<()> {
    let args: Vec<String> = env::args().collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[1..] {
        ["bindings", wit, out] => bindings(wit, Path::new(out)),
        ["component", module, out] => component(module, out),
        _ => bail!("usage: tripod-c bindings WIT DIRECTORY | component MODULE OUTPUT"),
    }
}

fn bindings(wit: &str, out: &Path) -> Result<()> {
    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_path(wit)?;
    let world = resolve.select_world(&[package], Some("server"))?;
    let mut files = Files::default();
    let opts = Opts { autodrop_borrows: Enabled::Yes, ..Opts::default() };
    opts.build().generate(&mut resolve, world, &mut files)?;
    fs::create_dir_all(out)?;
    for (name, text) in files.iter() {
        fs::write(out.join(name), text)?;
    }
    Ok(())
}

/// The adapter is used if the module imports WASI preview 1.
fn component(module: &str, out: &str) -> Result<()> {
    let module = fs::read(module)?;
    let mut encoder = ComponentEncoder::default();
    encoder.validate(true);
    encoder.module(&module)?.adapter("wasi_snapshot_preview1", ADAPTER)?;
    Ok(fs::write(out, encoder.encode()?)?)
}
