//! Compiles the worker protocol: the client for the gateway, the server for tests and examples.

use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let proto_root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    let proto_file = proto_root.join("m3stack/worker/v1/worker.proto");
    println!("cargo::rerun-if-changed={}", proto_file.display());
    let out_dir = PathBuf::from(std::env::var("OUT_DIR")?);
    generate(&proto_file, &proto_root, &out_dir.join("client"), false)?;
    generate(&proto_file, &proto_root, &out_dir.join("server"), true)?;
    Ok(())
}

/// Writes the messages and one side of the service to `target`.
fn generate(
    proto_file: &Path,
    proto_root: &Path,
    target: &Path,
    is_server: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    std::fs::create_dir_all(target)?;
    let descriptors = protox::compile([proto_file], [proto_root])?;
    tonic_prost_build::configure()
        .build_client(!is_server)
        .build_server(is_server)
        .build_transport(false)
        .bytes(".")
        .emit_rerun_if_changed(false)
        .out_dir(target)
        .compile_fds(descriptors)?;
    Ok(())
}
