"""Every key of LiteLLM's config.yaml, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

TABLE_OF = "1.110.2"
"""The release of litellm whose keys these are."""
Class = Literal["works", "named", "refused"]
"""works: does what it does in LiteLLM. named: has no effect here, and a warning says so. refused: it protects, so the
start is refused until it is supported or listed in `accept_unsupported`."""

WORKS: dict[str, str] = {
    "": "model_list router_settings litellm_settings general_settings environment_variables guardrails",
    "litellm_params": (
        "model api_base base_url api_key api_version organization custom_llm_provider extra_headers extra_body timeout "
        "stream_timeout max_retries num_retries rpm tpm max_parallel_requests max_budget budget_duration weight order "
        "input_cost_per_token output_cost_per_token cache_read_input_token_cost cache_creation_input_token_cost "
        "cache_creation_input_token_cost_above_1hr cache_read_input_audio_token_cost cache_read_input_image_token_cost "
        "input_cost_per_request citation_cost_per_token search_context_cost_per_query "
        "output_cost_per_reasoning_token input_cost_per_audio_token output_cost_per_audio_token "
        "input_cost_per_image_token output_cost_per_image_token input_cost_per_image output_cost_per_image "
        "input_cost_per_second output_cost_per_second input_cost_per_character output_cost_per_character "
        "input_cost_per_pixel output_cost_per_pixel "
        "mock_response drop_params additional_drop_params"
    ),
    "router_settings": (
        "routing_strategy model_group_alias num_retries max_fallbacks retry_after timeout stream_timeout fallbacks "
        "default_fallbacks context_window_fallbacks content_policy_fallbacks allowed_fails cooldown_time "
        "disable_cooldowns enable_pre_call_checks optional_pre_call_checks default_max_parallel_requests retry_policy "
        "model_group_retry_policy allowed_fails_policy redis_url redis_host redis_port redis_password redis_db"
    ),
    "litellm_settings": (
        "num_retries request_timeout fallbacks default_fallbacks context_window_fallbacks content_policy_fallbacks "
        "allowed_fails drop_params json_logs turn_off_message_logging telemetry forward_traceparent_to_llm_provider"
    ),
    "general_settings": "master_key max_request_size_mb",
}

NAMED: dict[str, dict[str, str]] = {
    "": {
        "LiteLLM's logging callbacks are not run; see `audit`, `log` and /metrics": "callback_settings",
        "only model calls are served": (
            "mcp_servers mcp_tools agent_list vector_store_registry files_settings finetune_settings "
            "assistant_settings search_tools prompts worker_registry"
        ),
    },
    "litellm_params": {
        "one deployment has one rate, shared by input and output": "itpm otpm",
        "write prices as numbers, or as a file under `prices`": "tiered_pricing off_peak_pricing",
        "tags do not choose deployments": "tags tag_regex",
        "callers cannot bring their own upstream keys": "configurable_clientside_auth_params",
        "write the key with os.environ/NAME": "litellm_credential_name",
        "parameters are passed on as they were sent": "allowed_openai_params modify_params",
        "answers are passed on as they came": "merge_reasoning_content_in_choices",
        "only text deployments are served": (
            "use_in_pass_through use_litellm_proxy vector_store_id milvus_text_field milvus_db_name "
            "milvus_partition_names valkey_host valkey_port valkey_password valkey_ssl valkey_text_field "
            "valkey_embedding_field"
        ),
        "the caller names the model": (
            "switchyard_router_config auto_router_config_path auto_router_config auto_router_default_model "
            "auto_router_embedding_model auto_router_max_input_chars auto_router_routing_compression "
            "auto_router_model_compression complexity_router_config complexity_router_default_model "
            "adaptive_router_default_model adaptive_router_config quality_router_config quality_router_default_model"
        ),
        "one timeout holds for all tiers": "timeout_by_service_tier stream_timeout_by_service_tier",
        "streams are relayed as they come": "keepalive_seconds allow_client_keepalive_override",
        "conversations stay by `sticky` of the tenant": "provider_affinity_header",
    },
    "router_settings": {
        "the strategy has no arguments here": "routing_strategy_args",
        "tags do not choose deployments": "enable_tag_filtering tag_filtering_match_any tag_routing_prefix",
        "write it into each entry's litellm_params": "default_litellm_params max_retries weights",
        "answers are not cached; see `store` for KV reuse": "cache_responses caching_groups cache_kwargs",
        "conversations stay by `sticky` of the tenant": (
            "deployment_affinity_ttl_seconds model_group_affinity_config session_affinity_repin_on_failover"
        ),
        "connections are kept by the router itself": "client_ttl",
        "health follows from real calls": (
            "enable_health_check_routing health_check_staleness_threshold health_check_ignore_transient_errors "
            "background_health_check_model_groups"
        ),
        "see `log`": "set_verbose debug_level",
        "there is no queue of requests": "default_priority polling_interval",
        "not part of this router": (
            "routing_groups enable_weighted_failover alerting_config assistants_config search_tools "
            "router_general_settings ignore_invalid_deployments enable_pre_call_check fallback_on_unsupported_params "
            "enable_mid_stream_fallback_continuation auto_router_capability_limit"
        ),
    },
    "litellm_settings": {
        "LiteLLM's callbacks are not run; see `audit`, `log` and /metrics": (
            "callbacks success_callback failure_callback service_callback service_callbacks audit_log_callbacks "
            "langfuse_default_tags redact_user_api_key_info s3_callback_params gcs_callback_params "
            "redact_messages_in_exceptions store_audit_logs datadog_params datadog_llm_observability_params "
            "prometheus_metrics_config prometheus_initialize_budget_metrics custom_prometheus_metadata_labels "
            "custom_prometheus_tags require_auth_for_metrics_endpoint input_callback prometheus_latency_buckets "
            "prometheus_exclude_metrics prometheus_exclude_labels standard_logging_payload_excluded_fields"
        ),
        "answers are not cached; see `store` for KV reuse": (
            "cache cache_params enable_caching_on_provider_specific_optional_params"
        ),
        "parameters are passed on as they were sent": (
            "modify_params disable_add_transform_inline_image_block disable_add_prefix_to_prompt "
            "disable_copilot_system_to_assistant use_chat_completions_url_for_anthropic_messages "
            "enable_json_schema_validation enable_preview_features drop_params_list "
            "LITELLM_DISABLE_STOP_SEQUENCE_LIMIT disable_stop_sequence_limit"
        ),
        "connections use the system's own certificates and addresses": (
            "ssl_verify force_ipv4 ssl_certificate ssl_security_level"
        ),
        "there is no key database and no UI": (
            "default_team_settings default_team_params default_internal_user_params max_internal_user_budget "
            "internal_user_budget_duration upperbound_key_generate_params default_key_generate_params "
            "key_generation_settings enable_key_alias_format_validation max_user_budget max_end_user_budget "
            "public_model_groups public_model_groups_links default_max_internal_user_budget"
        ),
        "costs are counted per tenant": (
            "disable_end_user_cost_tracking disable_end_user_cost_tracking_prometheus_only cost_discount_config "
            "cost_margin_config include_cost_in_streaming_usage"
        ),
        "tokens are counted by the models' own tokenizers": "disable_hf_tokenizer_download token_counter",
        "only model calls are served": "mcp_aliases priority_reservation_settings",
        "see `log`": "set_verbose suppress_debug_info log_raw_request_response request_correlation_in_logs",
        "write the costs into model_info": "custom_provider_map model_cost_map_url",
        "write it into router_settings": "max_fallbacks",
    },
    "general_settings": {
        "there is no database": (
            "database_url database_type database_args database_connection_pool_limit database_connection_timeout "
            "store_model_in_db supported_db_objects store_prompts_in_spend_logs disable_spend_logs "
            "disable_spend_updates disable_reset_budget disable_prisma_schema_update proxy_batch_write_at "
            "proxy_batch_polling_interval proxy_budget_rescheduler_min_time proxy_budget_rescheduler_max_time "
            "allow_requests_on_db_unavailable maximum_spend_logs_retention_period "
            "maximum_spend_logs_retention_interval use_redis_transaction_buffer user_api_key_cache_ttl "
            "disable_adding_master_key_hash_to_db spend_report_frequency disable_error_logs use_spend_logs_ledger "
            "database_connect_timeout database_socket_timeout database_max_idle_connection_lifetime "
            "database_extra_connection_params database_disable_prepared_statements spend_logs_prompt_storage "
            "spend_logs_metadata_fields disable_auto_add_proxy_admin_to_teams spend_capture_rate_check "
            "scheduled_job_stagger maximum_autorouter_session_retention_period maximum_health_check_retention_period "
            "maximum_daily_tag_spend_retention_period maximum_spend_logs_size maximum_spend_logs_cleanup_target_size "
            "maximum_spend_logs_size_check_interval use_spend_logs_partitioning maximum_spend_logs_cleanup_batch_size "
            "maximum_spend_logs_cleanup_max_batches maximum_spend_logs_cleanup_run_budget "
            "maximum_spend_logs_cleanup_batch_timeout maximum_spend_logs_cleanup_cron user_api_key_cache_max_size "
            "track_unmanaged_batch_cost disable_model_info_refresh request_tag_mappings allow_unmanaged_response_ids "
            "team_metadata_schema custom_team_metadata_validate"
        ),
        "there is no admin UI": (
            "disable_master_key_return ui_access_mode user_mcp_management_mode litellm_license custom_sso "
            "custom_ui_sso_sign_in_handler default_team_disabled custom_key_generate custom_key_update "
            "disable_responses_id_security control_plane_url allow_cli_sso_verification_uri_complete "
            "max_failed_login_attempts_per_source max_failed_login_attempts_per_source_overrides "
            "failed_login_window_seconds failed_login_block_seconds enable_public_model_hub password_policy_min_length "
            "password_policy_require_uppercase password_policy_require_lowercase password_policy_require_numbers "
            "password_policy_require_special_characters disable_password_login_when_sso_enabled "
            "disable_env_credential_login self_serve_budget_policy"
        ),
        "alerts are for the metrics' consumer": (
            "alerting alerting_threshold alerting_args alert_types alert_to_webhook_url alert_type_config"
        ),
        "health follows from real calls": (
            "background_health_checks health_check_interval health_check_details use_shared_health_check "
            "health_check_concurrency health_check_skip_disabled_background_models "
            "background_health_check_model_groups health_check_ignore_transient_errors "
            "health_check_staleness_threshold enable_health_check_routing model_list_healthy_only"
        ),
        "the caller names the model": (
            "completion_model embedding_model image_generation_model moderation_model infer_model_from_keys"
        ),
        "headers are not passed on": (
            "forward_client_headers_to_llm_api forward_openai_org_id add_user_information_to_llm_headers"
        ),
        "callers cannot bring their own upstream keys": "allow_client_side_credentials",
        "write it into the tenant": "disable_retry_on_max_parallel_request_limit_error",
        "secrets are os.environ/NAME": (
            "key_management_system key_management_settings use_azure_key_vault use_google_kms"
        ),
        "a hang-up always cancels upstream": "cancel_on_disconnect",
        "files are read again when they change, and on SIGHUP": "proxy_config_reload_interval_seconds",
        "there is no proxy in front that we trust": "use_x_forwarded_for trusted_proxy_ranges",
        "only keys of tenants are known": "service_account_settings allow_user_auth oauth2_config_mappings",
        "the admission of requests is not configurable": (
            "max_queued_requests_per_worker admission_queue_timeout_seconds"
        ),
        "a missing master key is refused off loopback": "dangerously_permit_weak_or_unset_master_key",
        "only model calls are served": (
            "search_tools enable_claude_code_gateway claude_code_gateway_managed_settings "
            "claude_code_marketplace_auth_required skill_scanner vector_store_deny_by_default "
            "search_tool_deny_by_default agent_access_default_deny mcp_internal_ip_ranges mcp_advertised_versions "
            "mcp_disabled_capabilities mcp_allowed_clients mcp_require_explicit_server_scope mcp_client_id_header "
            "mcp_trusted_proxy_ranges mcp_xff_num_trusted_hops mcp_prefer_client_id_metadata_document "
            "mcp_required_fields responses_websocket_session_limit_seconds enable_openai_websocket_passthrough "
            "vertex_ai_pass_through_drop_anthropic_betas transcribe_media_buckets allowed_client_side_s3_buckets "
            "allowed_client_side_s3_endpoint_urls"
        ),
        "see `otel` and `redis`": "otel tracing coordination_redis",
        "fallbacks never leave what the tenant's policy allows": "enforce_fallback_model_access",
        "no log and no record holds it": "disable_requester_ip_address_logging",
        "not part of this router": (
            "include_call_id_in_error_body expose_fallback_errors_to_caller return_wildcard_routes missing_session_id "
            "disable_fallbacks_on_per_model_rate_limits disable_budget_reservation"
        ),
        "see `timeout` in litellm_params and router_settings": "pass_through_request_timeout",
    },
}

REFUSED: dict[str, dict[str, str]] = {
    "": {
        "requests would run without this check": "policies policy_attachments policy_templates",
        "the named files would not be read": "include",
        "deployments would run without these credentials": "credential_list",
    },
    "litellm_params": {
        "requests would run without this check": "guardrails",
        "the limit would not hold; write it into the tenant": (
            "rpd tpd daily_reset_time max_file_size_mb default_api_key_tpm_limit default_api_key_rpm_limit"
        ),
    },
    "model_info": {
        "the group would be open to every tenant; list it under `models` of the tenants": "team_id access_groups",
    },
    "router_settings": {
        "the budget would not hold": "provider_budget_config",
        "requests would run without this check": "guardrail_list plugins fallback_access_check fallback_budget_check",
    },
    "litellm_settings": {
        "requests would run without this check": (
            "guardrails guardrail_name_config_map llm_guard_mode banned_keywords_list blocked_user_list "
            "presidio_ad_hoc_recognizers output_parse_pii pre_call_rules post_call_rules"
        ),
        "the budget would not hold; write it into the tenant": "max_budget budget_duration",
    },
    "general_settings": {
        "callers would be let in without this check": (
            "custom_auth custom_auth_run_common_checks enable_jwt_auth litellm_jwtauth enable_oauth2_auth "
            "enable_oauth2_proxy_auth litellm_key_header_name role_permissions custom_key_policy"
        ),
        "routes and addresses would stay open": (
            "allowed_ips allowed_routes admin_only_routes public_routes mcp_allowed_ips"
        ),
        "requests would run without this check": (
            "enforce_user_param enforced_params reject_clientside_metadata_tags user_header_name user_header_mappings "
            "enforced_file_expires_after plugins allowed_file_extensions blocked_file_extensions user_url_validation "
            "user_url_allowed_hosts provider_url_destination_allowed_hosts"
        ),
        "the limit would not hold; write it into the tenant": (
            "max_parallel_requests global_max_parallel_requests max_in_flight_requests_per_worker "
            "fail_closed_rate_limit_enforcement max_response_size_mb max_batch_file_size_mb max_batch_file_records "
            "max_batch_file_uploads_per_day max_file_downloads_per_minute max_file_size_mb "
            "fail_closed_budget_enforcement apply_user_budget_to_team_keys"
        ),
        "these routes would not be protected as written": (
            "pass_through_endpoints use_client_credentials_pass_through_routes"
        ),
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    """One key of LiteLLM's file; `scope` is the section it stands in, empty for the top."""

    scope: str
    key: str
    kind: Class
    reason: str = ""


def _rows() -> Iterator[Row]:
    for scope, keys in WORKS.items():
        yield from (Row(scope, key, "works") for key in keys.split())
    tables: tuple[tuple[Class, dict[str, dict[str, str]]], ...] = (("named", NAMED), ("refused", REFUSED))
    for kind, table in tables:
        for scope, reasons in table.items():
            for reason, keys in reasons.items():
                yield from (Row(scope, key, kind, reason) for key in keys.split())


TABLE: tuple[Row, ...] = tuple(_rows())
