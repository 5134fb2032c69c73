//! Gives the shared library its SONAME. The number is raised when a program that was linked with an
//! older libfirnapp could not run with the new one.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libfirnapp.so.1");
}
