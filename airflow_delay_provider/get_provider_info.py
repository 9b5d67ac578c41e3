def get_provider_info():
    return {
        "package-name": "airflow-delay-provider",
        "name": "Delay",
        "description": "Delayed and scheduled messages.",
    }
