//! Compiles the reader of JPEG scan lines against the libjpeg-turbo that `turbojpeg-sys` built, and
//! looks whether the compiler knows 512-bit vectors.

/// The first compiler (1.x) whose vector functions of 512 bits may be used.
const FIRST_WITH_AVX512: u32 = 89;

fn main() {
    println!("cargo:rustc-check-cfg=cfg(accepts_avx512)");
    let is_x86 = std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|name| name == "x86_64");
    if is_x86 && compiler_minor().is_some_and(|minor| minor >= FIRST_WITH_AVX512) {
        println!("cargo:rustc-cfg=accepts_avx512");
    }
    const SOURCE: &str = "src/decode/jpeg/scanlines.c";
    println!("cargo:rerun-if-changed={SOURCE}");
    println!("cargo:rerun-if-env-changed=DEP_TURBOJPEG_INCLUDE");
    let mut build = cc::Build::new();
    // several folders come with commas between them, as pkg-config may name more than one
    for folder in std::env::var("DEP_TURBOJPEG_INCLUDE").unwrap_or_default().split(',') {
        if !folder.is_empty() {
            build.include(folder);
        }
    }
    build.file(SOURCE).std("c99").warnings(true).opt_level(2).compile("m3stack_jpeg");
}

/// The x of `rustc 1.x.y`.
fn compiler_minor() -> Option<u32> {
    let compiler = std::env::var_os("RUSTC")?;
    let output = std::process::Command::new(compiler).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split('.').nth(1)?.parse().ok()
}
