//! Test guests, probes and experiments for Firn.

#![forbid(unsafe_code)]

pub mod demo;
pub mod demo_app;
pub mod demo_cluster;
pub mod disk_profile;
pub mod experiments;
pub mod firn;
pub mod guest;
pub mod guest_time;
pub mod kvm_host;
pub mod lab;
pub mod object_server;
pub mod outside_asker;
pub mod peer;
pub mod peer_template;
pub mod prober;
pub mod processors;
pub mod publish;
pub mod recorder;
pub mod report;
pub mod site;
pub mod slow_link;
pub mod stats;
pub mod toucher;
pub mod traffic;
pub mod web;
