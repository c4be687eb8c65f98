"""Options and variables of real training programs: nothing harmless is hidden, no secret shown."""

from __future__ import annotations

import pytest

from rankscope.process import environment
from rankscope.wire.redaction import HIDDEN, clean_fields, redact
from rankscope.wire.secret_names import holds_secret, is_plain

SECRET = """
--token --hub_token --hub-token --hf_token --hf-token --huggingface_token --hf_api_token
--auth_token --auth-token --access_token --access-token --refresh_token --api_token --bearer_token
--id_token --session_token --csrf_token --oauth_token --github_token --gitlab_token --slack_token
--bot_token --wandb_token --comet_token --neptune_api_token --mlflow_tracking_token --dagshub_token
--ngc_token --kaggle_token --replicate_token --vault_token --registry_token --registration_token
--deploy_token --personal_access_token --service_token --telegram_token --discord_token --pypi_token
--jwt_token
--hubToken --accessToken --authToken --apiToken --push_token --upload_token --login_token
--write_token --read_token --admin_token --secret_token --worker_token --cluster_token --k8s_token
HF_TOKEN HUGGING_FACE_HUB_TOKEN HUGGINGFACEHUB_API_TOKEN GITHUB_TOKEN GH_TOKEN GITLAB_TOKEN
CI_JOB_TOKEN NPM_TOKEN PYPI_TOKEN SLACK_BOT_TOKEN NEPTUNE_API_TOKEN AWS_SESSION_TOKEN
DOCKER_AUTH_TOKEN VAULT_TOKEN CONSUL_HTTP_TOKEN DATABRICKS_TOKEN MLFLOW_TRACKING_TOKEN
SENTRY_AUTH_TOKEN DIGITALOCEAN_ACCESS_TOKEN TELEGRAM_TOKEN DISCORD_TOKEN REPLICATE_API_TOKEN
TORCH_TOKEN --api_key --api-key --apikey --apiKey --access_key --access-key --secret_key
--secret-key --secret_access_key --private_key --private-key --account_key --storage_key --ssh_key
--encryption_key --signing_key --license_key --service_key --wandb_key --wandb_api_key --openai_key
--openai_api_key --anthropic_api_key --comet_api_key --azure_key --aws_key --client_key --shared_key
--subscription_key --deploy_key --master_key --team_key --clearml_api_access_key --api_keys
--minio_access_key --s3_secret_key --ngc_api_key --google_api_key --app_key --session_key --hmac_key
WANDB_API_KEY OPENAI_API_KEY ANTHROPIC_API_KEY COMET_API_KEY AWS_ACCESS_KEY AWS_SECRET_ACCESS_KEY
AZURE_STORAGE_KEY AZURE_STORAGE_ACCOUNT_KEY GOOGLE_API_KEY GEMINI_API_KEY COHERE_API_KEY
MISTRAL_API_KEY TOGETHER_API_KEY CLEARML_API_SECRET_KEY CLEARML_API_ACCESS_KEY NGC_API_KEY
MINIO_SECRET_KEY KAGGLE_KEY_SECRET DD_API_KEY DD_APP_KEY ELASTIC_API_KEY PINECONE_API_KEY
GRAFANA_API_KEY SERPER_API_KEY LANGCHAIN_API_KEY DEEPSEEK_API_KEY GROQ_API_KEY
--password --passwd --db_password --db-password --user_password --redis_password --smtp_password
--root_password --ssh_password --sudo_password --http_password --proxy_password --keystore_password
--dbPassword --passphrase --ssh_passphrase --key_passphrase --gpg_passphrase --pwd --db_pwd
--passcode --pass --db_pass --user_pass --smtp_pass --proxy_pass --admin_pass --passwords
PGPASSWORD MYSQL_PWD MYSQL_PASSWORD MYSQL_ROOT_PASSWORD POSTGRES_PASSWORD REDIS_PASSWORD
DB_PASSWORD SMTP_PASSWORD SSHPASS_PASSWORD SUDO_PASSWORD RABBITMQ_PASSWORD MONGO_PASSWORD
MLFLOW_TRACKING_PASSWORD KERBEROS_PASSWORD LDAP_PASSWORD DOCKER_PASSWORD ARTIFACTORY_PASSWORD
--secret --client_secret --client-secret --app_secret --webhook_secret --oauth_secret --jwt_secret
--shared_secret --consumer_secret --secrets --aws_secret --cluster_secret --rpc_secret
CLIENT_SECRET AZURE_CLIENT_SECRET AWS_SECRET GITHUB_WEBHOOK_SECRET JWT_SECRET FLASK_SECRET
--credential --credentials --aws_credentials --creds --db_creds --cred --gcp_credentials
AWS_CREDENTIALS GCP_CREDENTIALS --auth --basic_auth --http_auth --proxy_auth --registry_auth
--authorization --cookie --session_cookie --jwt --bearer DOCKER_AUTH REDIS_AUTH
--slack_webhook_url SLACK_WEBHOOK_URL
""".split()

HARMLESS = """
--tokenizer --tokenizer_name --tokenizer-name --tokenizer_path --tokenizer_type --tokenizer_file
--use_fast_tokenizer --tokenized_dataset --tokenize --num_tokenizer_workers --tokenizer_revision
--max_new_tokens --max-new-tokens --max_tokens --num_tokens --total_tokens --min_tokens
--tokens_per_batch --tokens_per_step --batch_tokens --max_prompt_tokens --train_tokens
--warmup_tokens --special_tokens --additional_special_tokens --skip_special_tokens
--add_special_tokens --image_tokens --num_image_tokens --eval_tokens --max_total_tokens --new_tokens
--stop_tokens --suppress_tokens --tokens --prompt_tokens --context_tokens --vision_tokens
--eos_token --bos_token --pad_token --unk_token --cls_token --sep_token --mask_token --image_token
--eos_token_id --pad_token_id --bos_token_id --decoder_start_token_id --forced_bos_token_id
--audio_token --video_token --special_token --stop_token --start_token --end_token --next_token
--prefix_token --suffix_token --class_token --use_cls_token --distill_token --token_type_ids
--token_dropout --token_file --token_path --token_embedding_dim --token_classification --token_mask
--time_per_token --cost_per_token --first_token --blank_token --register_token --language_token
--loss_per_token --use_auth_token --no_token --separator_token --pad_to_token_multiple
--drop_last_token --ms_per_token --fim_middle_token --think_token --token_count --task_token
--num_key_value_heads --num-key-value-heads --key_dim --value_key --query_key --num_keys --key_size
--key_value_cache --kv_key --keys --sort_key --primary_key --image_key --text_key --label_key
--label_keys --input_key --input_keys --output_key --target_key --data_key --column_key --cache_key
--dict_key --state_dict_key --state_key --group_key --partition_key --row_key --key_name --key_type
--key_frames --keypoints --keyframe_interval --key_padding_mask --monkey --keyboard --keep_keys
--keyword --keywords --hotkey --loss_key --metric_key --monitor_key --feature_key --caption_key
--shuffle_key --prng_key --rng_key --key_seed --random_key --qk_norm --num_query_key_heads
--author --authors --author_name --author_email --authority --authored_by --auth_type --auth_mode
--auth_method --auth_scheme --authentication_mode --no_auth --disable_auth --require_auth
--auth_provider --authorize --authorized_users
--passes --num_passes --forward_pass --backward_pass --single_pass --two_pass --first_pass --bypass
--bypass_norm --compass --low_pass --high_pass --band_pass --pass_through --passthrough --pass_rate
--pass_at_k --pass_mask --by_pass --encoder_pass_count --multi_pass --num_pass --eval_pass
--passage_length --passenger --password_file --password_length --password_policy
--secret_name --secret_santa_mode --secretary --secret_path --secret_file --secret_size
--credential_path --credentials_file --credential_helper --accredited --credit --incredible_mode
--cookie_jar --cookies_file --jwt_file --api_key_file --private_key_path --ssh_key_file
--api_key_env --api_key_name --key_vault_name --api_base --api_version --access_mode --private
--public_key_size --account --account_name --storage_account --service_account_email --service
MASTER_ADDR MASTER_PORT TOKENIZERS_PARALLELISM NCCL_DEBUG OMP_NUM_THREADS CUDA_VISIBLE_DEVICES
TORCH_NCCL_ASYNC_ERROR_HANDLING PYTORCH_CUDA_ALLOC_CONF SSH_AUTH_SOCK TOKENIZER_PATH MAX_TOKENS
KEYRING_BACKEND PASSENGER_APP_ENV HF_TOKEN_PATH AUTHOR XDG_SESSION_TYPE GIT_AUTHOR_NAME
GPG_KEY_ID KEY_VALUE_HEADS NUM_TOKENS COMPASS_DIR TORCH_KEY_AVERAGES
--lr --learning_rate --batch_size --hidden_size --config --output_dir --url --dataset_url --uri
--db_uri --sign --signature_columns --session --login --user --username --host --port
""".split()


def test_there_are_enough_of_each() -> None:
    assert len(set(SECRET)) >= 200
    assert len(set(HARMLESS)) >= 200


@pytest.mark.parametrize("name", sorted(set(SECRET)))
def test_a_name_that_holds_a_secret(name: str) -> None:
    assert holds_secret(name)


@pytest.mark.parametrize("name", sorted(set(HARMLESS)))
def test_a_name_that_holds_none(name: str) -> None:
    assert not holds_secret(name)


VALUE = "aB3dE6gH9jK2mN5p"


@pytest.mark.parametrize("name", sorted(set(SECRET)))
def test_its_value_is_hidden_wherever_it_stands(name: str) -> None:
    bare = name.lstrip("-")
    assert environment.command([name, VALUE, "a.py"])[1:] == [HIDDEN, "a.py"] or name == bare
    assert environment.command([f"{name}={VALUE}"]) == [f"{name}={HIDDEN}"]
    assert clean_fields({bare: VALUE}) == {bare: HIDDEN}
    for text in (
        f"{bare}={VALUE} x", f"{bare}: {VALUE}", f'{{"{bare}": "{VALUE}", "x": 1}}',
        f"Namespace({bare}='{VALUE}', x=1)", f"http://h/x?a=1&{bare}={VALUE}&b=2",
        f"run.py --{bare} {VALUE} --x", f"export {bare}={VALUE}",
    ):  # fmt: skip
        assert redact(text) == text.replace(VALUE, HIDDEN)
    assert all(VALUE not in value for value in environment.snapshot({bare: VALUE}).values())


@pytest.mark.parametrize("name", sorted(set(HARMLESS)))
def test_a_harmless_one_keeps_its_value_wherever_it_stands(name: str) -> None:
    bare = name.lstrip("-")
    assert environment.command([name, VALUE, f"{name}={VALUE}"]) == [name, VALUE, f"{name}={VALUE}"]
    assert clean_fields({bare: VALUE}) == {bare: VALUE}
    for text in (
        f"{bare}={VALUE} x", f"{bare}: {VALUE}", f'{{"{bare}": "{VALUE}", "x": 1}}',
        f"Namespace({bare}='{VALUE}', x=1)", f"http://h/x?a=1&{bare}={VALUE}&b=2",
        f"run.py --{bare} {VALUE} --x",
    ):  # fmt: skip
        assert redact(text) == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--token", "true"), ("--hub_token", "None"), ("--hub_token", "$HF_TOKEN"),
        ("--hub_token", "${HF_TOKEN}"), ("--token", "50256"), ("--auth", "off"), ("--password", ""),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/gcp/key.json"), ("--ssh_key", "~/.ssh/id.pem"),
        ("--api_key", "<your key>"), ("--api_key", "***"),
    ],
)  # fmt: skip
def test_a_value_that_can_be_no_secret_stays(name: str, value: str) -> None:
    assert is_plain(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--password", "1234"), ("--password", "hunter2"), ("--hub_token", "hf_abc"),
        ("--api_key", "0123456789abcdef"), ("--token", "abc.def.ghi"), ("--secret", "truex"),
        ("--access_key", "wJalrXUtnFEMI/K7MDENG/bPxRfiCY"), ("--pwd", "2024"),
    ],
)  # fmt: skip
def test_a_value_that_may_be_one_does_not(name: str, value: str) -> None:
    assert not is_plain(name, value)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hub_token", "hf_x", "a.py"], ["--hub_token", "***", "a.py"]),
        (["--hub_token=hf_x", "a.py"], ["--hub_token=***", "a.py"]),
        (["--use_auth_token", "train.csv"], ["--use_auth_token", "train.csv"]),
        (["--password", "--lr", "1"], ["--password", "--lr", "1"]),
        (["--token", "true", "x"], ["--token", "true", "x"]),
        (["--max_new_tokens", "512"], ["--max_new_tokens", "512"]),
        (["--num_key_value_heads=8", "--author", "Bob"],
         ["--num_key_value_heads=8", "--author", "Bob"]),
        (["trainer.hub_token=hf_x", "model.tokenizer=gpt2"],
         ["trainer.hub_token=***", "model.tokenizer=gpt2"]),
        (["HF_TOKEN=hf_x", "python"], ["HF_TOKEN=***", "python"]),
    ],
)  # fmt: skip
def test_a_command_line(words: list[str], shown: list[str]) -> None:
    assert environment.command(words) == shown
